"""Tables whose times are a thousand times too long are named, and only those."""

from __future__ import annotations

import pytest
from commands import invoke
from test_peaks import GOOD, HEAD

from g5cp_vec.calibration.peaks import SLOW_FACTOR

SAID = "check that its times are in the unit that their column names"


def calibrate(tmp_path, texts, *options):
    tables = [tmp_path / f"table{i}.csv" for i in range(len(texts))]
    for table, text in zip(tables, texts, strict=True):
        table.write_text(text)
    return invoke("calibrate", *tables, "--chip", "h100-sxm", *options)


def test_microseconds_in_a_column_of_milliseconds_are_named(tmp_path):
    good, slow = HEAD + GOOD, HEAD.replace("latency_us", "latency_ms") + GOOD
    for options in (["-o", tmp_path / "chip.toml"], ["--evaluate"]):
        assert calibrate(tmp_path, [good], *options).stderr == ""
        found = calibrate(tmp_path, [good, slow], *options)
        assert found.exit_code == 0
        (line,) = found.stderr.splitlines()
        # FLOPs at 989 TFLOP/s, or bytes at 3.35 TB/s, or 10 us.
        ratios = []
        for m in (64, 128, 256, 512, 1024, 4096):
            bound_s = max(2 * 4096**2 * m / 989e12, 2 * (4096**2 + 2 * m * 4096) / 3.35e12, 1e-5)
            ratios.append((20 + 0.06 * m) * 1e-3 / bound_s)
        median = sum(sorted(ratios)[2:4]) / 2
        assert median > 1000 > SLOW_FACTOR
        begin = (
            f"table1.csv: half of its 6 rows or more take {median:,.0f} times what the peaks and 10 us of launch allow"
        )
        assert line == f"{begin}, or longer; {SAID}"


@pytest.mark.parametrize(("n_slow", "named"), [(3, False), (7, True)])
def test_what_most_rows_say_counts(tmp_path, n_slow, named):
    slow = "".join(f"h100_sxm,mine,{8 * (i + 1)},4096,4096,bfloat16,20000\n" for i in range(n_slow))
    found = calibrate(tmp_path, [HEAD + GOOD + slow], "--evaluate")
    assert (SAID in found.stderr) == named
