// Replays a workload (the text of workloads.as_text) in SimGrid and times the simulation loop alone.
//
//   simgrid_replay WORKLOAD.txt [--computes=exec|timer] [--update=Lazy|Full]
//
// Prints one line of JSON: makespan, wall-clock seconds of the loop, and how many ops ended. Everything that can be made
// before the loop is: the platform, and every activity.
//
// A flow waits its latency on a timer and then crosses its links, which have no latency of their own; the network
// model is CM02 without any factor, so shares are max-min fair. A route becomes one host of a star whose uplinks are
// the route's links, and every flow goes from its route's host to a sink that has none.
// A compute is an activity on its chip's host ("exec"), or only a timer ("timer"): no two share a chip, so nothing has
// to be solved for them. A chip takes the ready compute with the lowest priority. Dependencies are resolved in the
// callback of every end. (SimGrid's own, add_successor, took twice as long, and cannot let a chip choose.)

#include <simgrid/kernel/Timer.hpp>
#include <simgrid/s4u.hpp>
#include <xbt/log.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <queue>
#include <stdexcept>
#include <string>
#include <vector>

namespace sg4 = simgrid::s4u;

struct Op {
  bool is_flow = false;
  int chip = -1;    // of a compute
  int prio = 0;     // of a compute
  int route = -1;   // of a flow: index of its host, -1 for none
  double amount = 0;  // seconds or bytes
  double latency = 0;
  int waits_for = 0;
  std::vector<int> successors;
  sg4::ActivityPtr activity;
};

struct Workload {
  std::vector<double> bandwidth;
  int n_chips = 0;
  std::vector<Op> ops;
  std::vector<std::vector<int>> routes;
};

class Reader {
  std::vector<char> text_;
  char* at_;

public:
  explicit Reader(const char* path)
  {
    FILE* file = std::fopen(path, "rb");
    if (file == nullptr)
      throw std::runtime_error(std::string(path) + ": cannot be read");
    std::fseek(file, 0, SEEK_END);
    text_.resize(std::ftell(file) + 1);
    std::rewind(file);
    if (std::fread(text_.data(), 1, text_.size() - 1, file) != text_.size() - 1)
      throw std::runtime_error(std::string(path) + ": cannot be read");
    std::fclose(file);
    text_.back() = '\0';
    at_ = text_.data();
  }
  long whole() { return std::strtol(at_, &at_, 10); }
  double number() { return std::strtod(at_, &at_); }
};

static Workload read_workload(const char* path)
{
  Reader reader(path);
  Workload w;
  w.bandwidth.resize(reader.whole());
  w.n_chips = reader.whole();
  w.ops.resize(reader.whole());
  long n_deps = reader.whole();
  for (double& bandwidth : w.bandwidth)
    bandwidth = reader.number();
  std::map<std::vector<int>, int> known;
  for (Op& op : w.ops) {
    op.is_flow = reader.whole() == 1;
    if (op.is_flow) {
      op.amount = reader.number();
      op.latency = reader.number();
      std::vector<int> route(reader.whole());
      for (int& link : route)
        link = reader.whole();
      if (not route.empty() && op.amount > 0) {
        auto [place, is_new] = known.emplace(route, w.routes.size());
        if (is_new)
          w.routes.push_back(route);
        op.route = place->second;
      }
    } else {
      op.chip = reader.whole();
      op.prio = reader.whole();
      op.amount = reader.number();
    }
  }
  for (long i = 0; i < n_deps; i++) {
    long pred = reader.whole();
    long succ = reader.whole();
    w.ops[pred].successors.push_back(succ);
    w.ops[succ].waits_for++;
  }
  return w;
}

struct Platform {
  std::vector<sg4::Host*> chips;
  std::vector<sg4::Host*> routes;
  sg4::Host* sink = nullptr;
};

static Platform make_platform(const Workload& w)
{
  Platform p;
  auto* zone = sg4::create_star_zone("zone");
  std::vector<const sg4::Link*> links;
  for (size_t i = 0; i < w.bandwidth.size(); i++)
    links.push_back(zone->create_link("link" + std::to_string(i), w.bandwidth[i])->set_latency(0)->seal());
  auto add = [zone](const std::string& name, const std::vector<sg4::LinkInRoute>& up) {
    auto* host = zone->create_host(name, 1.0)->seal();
    zone->add_route(host->get_netpoint(), nullptr, nullptr, nullptr, up, false);
    zone->add_route(nullptr, host->get_netpoint(), nullptr, nullptr, std::vector<sg4::LinkInRoute>(), false);
    return host;
  };
  p.sink = add("sink", {});
  for (size_t i = 0; i < w.routes.size(); i++) {
    std::vector<sg4::LinkInRoute> up;
    for (int link : w.routes[i])
      up.emplace_back(links[link]);
    p.routes.push_back(add("route" + std::to_string(i), up));
  }
  for (int i = 0; i < w.n_chips; i++)
    p.chips.push_back(add("chip" + std::to_string(i), {}));
  zone->seal();
  return p;
}

// Plays the ops with dependencies of our own.
class Replay {
  Workload& w_;
  Platform& p_;
  bool timers_;
  using Ready = std::priority_queue<std::pair<int, int>, std::vector<std::pair<int, int>>, std::greater<>>;
  std::vector<Ready> ready_;
  std::vector<char> busy_;
  std::vector<int> ended_; // in this call, not told to their successors yet
  std::vector<int> touched_;
  bool draining_ = false;
  sg4::ActivityPtr last_;

public:
  double makespan = 0;
  size_t n_done = 0;

  Replay(Workload& w, Platform& p, bool timers) : w_(w), p_(p), timers_(timers), ready_(w.n_chips), busy_(w.n_chips)
  {
    sg4::Activity::on_completion_cb([this](const sg4::Activity& activity) {
      int op = static_cast<int>(reinterpret_cast<size_t>(activity.get_data<void>()));
      last_ = std::move(w_.ops[op].activity); // it is still at work on itself; the one before is let go
      ended_.push_back(op);
      drain();
    });
  }

  void begin()
  {
    for (size_t i = 0; i < w_.ops.size(); i++)
      if (w_.ops[i].waits_for == 0)
        release(i);
    drain();
  }

private:
  void at(double delay, int op, bool is_end)
  {
    simgrid::kernel::timer::Timer::set(sg4::Engine::get_clock() + delay, [this, op, is_end] {
      if (is_end)
        ended_.push_back(op);
      else
        move(op);
      drain();
    });
  }

  void start(const sg4::ActivityPtr& activity, int i)
  {
    activity->set_data(reinterpret_cast<void*>(static_cast<size_t>(i)));
    activity->start();
    w_.ops[i].activity = activity;
  }

  void move(int i)
  {
    const Op& op = w_.ops[i];
    if (op.route < 0)
      ended_.push_back(i);
    else
      start(sg4::Comm::sendto_init(p_.routes[op.route], p_.sink)->set_payload_size(static_cast<uint64_t>(op.amount)), i);
  }

  void release(int i)
  {
    const Op& op = w_.ops[i];
    if (not op.is_flow) {
      ready_[op.chip].emplace(op.prio, i);
      touched_.push_back(op.chip);
    } else if (op.latency > 0) {
      at(op.latency, i, false);
    } else {
      move(i);
    }
  }

  void dispatch(int chip)
  {
    if (busy_[chip] || ready_[chip].empty())
      return;
    int i = ready_[chip].top().second;
    ready_[chip].pop();
    busy_[chip] = 1;
    if (w_.ops[i].amount == 0)
      ended_.push_back(i);
    else if (timers_)
      at(w_.ops[i].amount, i, true);
    else
      start(sg4::Exec::init()->set_host(p_.chips[chip])->set_flops_amount(w_.ops[i].amount), i);
  }

  void drain()
  {
    if (draining_)
      return;
    draining_ = true;
    while (not ended_.empty() || not touched_.empty()) {
      while (not ended_.empty()) {
        int i = ended_.back();
        ended_.pop_back();
        Op& op = w_.ops[i];
        n_done++;
        makespan = sg4::Engine::get_clock();
        if (not op.is_flow) {
          busy_[op.chip] = 0;
          touched_.push_back(op.chip);
        }
        for (int next : op.successors)
          if (--w_.ops[next].waits_for == 0)
            release(next);
      }
      while (not touched_.empty()) {
        int chip = touched_.back();
        touched_.pop_back();
        dispatch(chip);
      }
    }
    draining_ = false;
  }
};

static std::string option(int argc, char** argv, const std::string& name, const std::string& otherwise)
{
  std::string head = "--" + name + "=";
  for (int i = 2; i < argc; i++)
    if (std::strncmp(argv[i], head.c_str(), head.size()) == 0)
      return argv[i] + head.size();
  return otherwise;
}

int main(int argc, char** argv)
{
  int n_own = 1;
  xbt_log_control_set("root.thres:warning");
  sg4::Engine engine(&n_own, argv);
  const std::string update = option(argc, argv, "update", "Lazy");
  for (const std::string& setting :
       {std::string("network/model:CM02"), std::string("network/TCP-gamma:0"), std::string("network/bandwidth-factor:1"),
        std::string("network/latency-factor:1"), std::string("network/weight-S:0"), std::string("network/crosstraffic:0"),
        std::string("network/loopback-lat:0"), std::string("surf/precision:1e-15"), std::string("maxmin/precision:1e-12"),
        "network/optim:" + update, "cpu/optim:" + update})
    sg4::Engine::set_config(setting);
  Workload w = read_workload(argv[1]);
  Platform p = make_platform(w);
  engine.seal_platform();
  Replay replay(w, p, option(argc, argv, "computes", "exec") == "timer");
  auto begin = std::chrono::steady_clock::now();
  replay.begin();
  engine.run();
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("{\"makespan\": %.17g, \"seconds\": %.9f, \"n_done\": %zu}\n", replay.makespan, seconds, replay.n_done);
  std::fflush(stdout);
  std::_Exit(0); // tearing down a million activities is nobody's question
}
