"""``g5cp-vec calibrate``: measured kernels in, a chip file with their durations out; or predictions beside them."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from g5cp_vec.cli._words import UserPath, doing, say

if TYPE_CHECKING:
    from g5cp_vec.calibration.evaluate import Evaluation
    from g5cp_vec.calibration.tables import Row
    from g5cp_vec.config.chip import Chip

# Of one kind of kernel; a thousand take minutes.
MOST_FITTED_ROWS = 3000


@click.command(
    "calibrate",
    epilog="\b\nExample:\n  g5cp-vec calibrate gemm.csv --chip h100-sxm -o mine.toml\n"
    "  g5cp-vec calibrate gemm.csv --chip h100-sxm --evaluate --csv",
)
@click.argument("tables", metavar="TABLE.csv...", nargs=-1, required=True, type=UserPath())
@click.option("--chip", "chip_name", required=True, metavar="NAME", help="A preset or a chip TOML.")
@click.option("-o", "--output", type=UserPath(), help="Chip TOML to write.")
@click.option("--evaluate", is_flag=True, help="Fit nothing: predict the rows with the chip's calibration.")
@click.option("--system", help="The chip's name in the tables, where it is not the chip's (h100_sxm for h100-sxm).")
@click.option("--source", default="", help="Where the measurements are from, with their licence; kept in the file.")
@click.option("--csv", "as_csv", is_flag=True, help="With --evaluate: every row, as CSV.")
@click.option("--json", "as_json", is_flag=True, help="With --evaluate: every row and the summary, as JSON.")
def command(
    tables: tuple[Path, ...],
    chip_name: str,
    output: Path | None,
    evaluate: bool,
    system: str | None,
    source: str,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Learn how long kernels take on a chip from measured ones.

    A table is recognised by its columns; README says which are needed. Rows of other chips in the same table help where
    kernels agree. Surfaces that the tables say nothing about stay as the chip has them.
    """
    from g5cp_vec.calibration.peers import system_of
    from g5cp_vec.calibration.tables import read_tables
    from g5cp_vec.config.chip import load_chip

    _check_options(output, evaluate, as_csv or as_json)
    _check_output(output, tables)
    chip = load_chip(chip_name)
    name = system or system_of(chip)
    doing("reading the tables")
    rows = read_tables(tables, name)
    doing(f"{'predicting' if evaluate else 'fitting'} {len(rows)} rows")
    if evaluate:
        _evaluate(chip, chip_name, name, rows, as_csv, as_json)
    else:
        assert output is not None
        _fit(chip, chip_name, name, rows, tables, source, output)


def _check_options(output: Path | None, evaluate: bool, rows_wanted: bool) -> None:
    from g5cp_vec.errors import ConfigError

    if evaluate and output is not None:
        raise ConfigError("-o: nothing is fitted with --evaluate; leave one of them out")
    if not evaluate and output is None:
        raise ConfigError("-o: missing; name the chip TOML to write, or give --evaluate")
    if rows_wanted and not evaluate:
        raise ConfigError("--csv, --json: only with --evaluate")


def _check_output(output: Path | None, tables: tuple[Path, ...]) -> None:
    """Refuse to write over measurements."""
    from g5cp_vec.errors import ConfigError

    for table in tables:
        if output is not None and output.exists() and table.exists() and output.samefile(table):
            raise ConfigError(f"-o: {output} is a table to be read; name another file")


def _rows_of(rows: list[Row], name: str) -> list[Row]:
    """Return the chip's own rows; refuse tables without any."""
    from g5cp_vec.errors import ConfigError

    own = [row for row in rows if row.system == name]
    if not own:
        found = ", ".join(sorted({row.system for row in rows}))
        raise ConfigError(f"system: no row of {name!r} in the tables, they hold {found}; give --system")
    return own


def _evaluate(chip: Chip, chip_name: str, name: str, rows: list[Row], as_csv: bool, as_json: bool) -> None:
    from g5cp_vec.calibration.evaluate import evaluate
    from g5cp_vec.calibration.fit import Machine
    from g5cp_vec.calibration.peaks import describe_too_fast, describe_too_slow, split_by_peak
    from g5cp_vec.errors import ConfigError

    if chip.calibration is None:
        raise ConfigError(f"{chip_name}: has no [calibration]; make one with g5cp-vec calibrate … -o chip.toml")
    own = _rows_of(rows, name)
    machines = {name: Machine.of(chip)}
    say(*describe_too_slow(own, machines))
    _, too_fast = split_by_peak(own, machines)
    if too_fast:
        say(f"{describe_too_fast(too_fast, len(own))}; no prediction does")
    result = evaluate(chip, own)
    if as_csv:
        click.echo(result.rows.write_csv(), nl=False)
    elif as_json:
        click.echo(_json_of(result))
    else:
        _print_evaluation(result)


def _json_of(result: Evaluation) -> str:
    import json

    return json.dumps({"rows": result.rows.to_dicts(), "summary": result.summary.to_dicts()}, allow_nan=False)


def _print_evaluation(result: Evaluation) -> None:
    from g5cp_vec.cli._output import print_table

    header = ["table", "system", "rows", "none", "outside", "median", "p90", "> 20 us", "median", "p90"]
    lines = [
        (
            row["table"], row["system"], str(row["rows"]), str(row["unpredicted"]), str(row["extrapolated"]),
            _percent(row["median"]), _percent(row["p90"]),
            str(row["long_rows"]), _percent(row["long_median"]), _percent(row["long_p90"]),
        )
        for row in result.summary.iter_rows(named=True)
    ]  # fmt: skip
    print_table(header, lines, n_left=2)
    click.echo("error = |predicted / measured - 1|; none: not predicted; outside: of the calibration's sizes")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _fit(
    chip: Chip, chip_name: str, name: str, rows: list[Row], tables: tuple[Path, ...], source: str, output: Path
) -> None:
    from g5cp_vec.calibration.fit import FEW_ROWS, MANY_BYTES, calibration_of, fit_rows
    from g5cp_vec.calibration.peaks import describe_too_fast, describe_too_slow, split_by_peak
    from g5cp_vec.calibration.peers import known_machines
    from g5cp_vec.calibration.write import chip_text
    from g5cp_vec.config._files import locate
    from g5cp_vec.config._text import in_unicode
    from g5cp_vec.errors import ConfigError

    _rows_of(rows, name)
    machines = known_machines(chip, name)
    ignored = sorted({row.system for row in rows} - set(machines))
    if ignored:
        say(f"rows of {', '.join(ignored)} are left out: no peak rates are known for them")
    known = [row for row in rows if row.system in machines]
    possible, too_fast = split_by_peak(known, machines)
    said_of_them = describe_too_fast(too_fast, len(known)) if too_fast else ""
    if not any(row.system == name for row in possible):
        raise ConfigError(f"{said_of_them}; no row of {name!r} is left: check units, element types and the chip")
    _refuse_many(possible)
    fitted = fit_rows(possible, machines, name)
    names = [in_unicode(table.name) for table in tables]
    said = in_unicode(source) or f"measured rows of {', '.join(names)}"
    calibration = calibration_of(fitted, chip.calibration, said, names)
    text = chip_text(locate("chips", chip_name), calibration)
    try:
        _write_whole(output, text)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror or error}") from None
    if said_of_them:
        say(f"{said_of_them}; they are left out, check units and element types")
    say(*describe_too_slow(known, machines))
    _print_fit(fitted, calibration)
    if calibration.memory_efficiency is None:
        needed = f"GEMMs with m <= {FEW_ROWS} and {MANY_BYTES // 10**6} MB or more"
        click.echo(f"element-wise work stays at the default efficiency: {needed} would measure it")
    click.echo(f"surfaces of {chip.name}: {len(fitted.surfaces)} fitted, {len(calibration.surface)} in {output}")


def _refuse_many(rows: list[Row]) -> None:
    """Refuse more rows of one kind than can be fitted: all are solved for at once."""
    from g5cp_vec.errors import ConfigError

    for kind, n in Counter(row.kind for row in rows).items():
        if n > MOST_FITTED_ROWS:
            raise ConfigError(
                f"{kind}: {n} rows to fit, expected at most {MOST_FITTED_ROWS}, for the time grows with their cube; "
                "keep a sample of them (--evaluate takes them all)"
            )


def _write_whole(output: Path, text: str) -> None:
    """Write a file such that what stood there is lost only to a whole one."""
    if output.exists() and not output.is_file():  # a pipe, like /dev/stdout
        output.write_text(text, encoding="utf-8")
        return
    output = output.resolve()
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


def _print_fit(fitted: Any, calibration: Any) -> None:
    """Print the residuals on rows that were not used for the fit, surface by surface."""
    from g5cp_vec.cli._output import print_table

    chosen = {surface.variant: surface.default_for for surface in calibration.surface}
    lines = [
        (
            s.kind, s.library, ", ".join(value for _, value in s.labels if value), chosen[s.variant], str(s.n_rows),
            _percent(s.median_error), _percent(s.p90_error),
        )
        for s in fitted.surfaces
    ]  # fmt: skip
    print_table(["kind", "library", "labels", "default for", "rows", "median", "p90"], lines, n_left=4)
    click.echo("errors on rows held out of the fit, a tenth or one at a time; none with fewer than five rows of a kind")
