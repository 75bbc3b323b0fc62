#include "bindings/handshake.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/topology.h"
#include "handshake/driver.h"
#include "handshake/probe.h"

namespace ft::py {
namespace {

using handshake::Choice;
using handshake::Driver;
using handshake::Finding;
using handshake::Mechanism;
using handshake::Vendor;

std::chrono::milliseconds milliseconds(const char* name, double seconds) {
  if (!(seconds >= 0.001 && seconds <= 86'400)) {
    throw nb::value_error((std::string(name) + ": found " + std::to_string(seconds) +
                           ", expected 0.001 to 86400 seconds").c_str());
  }
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

handshake::ProbeOptions probe_options(int layers, int rounds, double time_limit_seconds) {
  if (layers < 1 || rounds < 1) throw nb::value_error("layers, rounds: expected at least 1 of each");
  handshake::ProbeOptions options;
  options.layers = layers;
  options.rounds = rounds;
  options.time_limit = milliseconds("time_limit_seconds", time_limit_seconds);
  return options;
}

handshake::CoordinatorOptions coordinator_options(const Context& context, double stall_limit_seconds) {
  const std::vector<int> allowed = allowed_cpus();
  handshake::CoordinatorOptions options;
  std::vector<int> cores;
  for (const Place& place : physical_cores(allowed)) cores.push_back(place.cpu);
  options.seat = handshake::plan_seat(context.cpus(), cores, allowed);
  options.stall_limit = milliseconds("stall_limit_seconds", stall_limit_seconds);
  return options;
}

handshake::Stream stream_of(std::uintptr_t handle) { return reinterpret_cast<handshake::Stream>(handle); }

}  // namespace

GpuHandshake::GpuHandshake(std::shared_ptr<Driver> driver, nb::handle_t<Context> context, Mechanism mechanism,
                           bool capturable, double stall_limit_seconds)
    : context_(nb::borrow(context)) {
  const auto options = coordinator_options(nb::cast<const Context&>(context), stall_limit_seconds);
  handshake_ = handshake::make_handshake(mechanism, std::move(driver), options, capturable);
}

GpuHandshake::~GpuHandshake() { finish(); }

// What a job that never ends may touch is never freed.
bool GpuHandshake::finish() {
  bool whole = false;
  {
    const nb::gil_scoped_release release;
    whole = handshake_->close();
  }
  if (!whole) {
    for (nb::object& object : uses_) static_cast<void>(object.release());
    uses_.clear();
  }
  return whole;
}

void GpuHandshake::close() {
  if (!finish()) {
    throw std::runtime_error("a job of the CPU workers never ended; its thread and its memory were left behind");
  }
}

int GpuHandshake::add_experts(nb::handle_t<Bank> bank, Array x, Array weights, Array ids, Array out,
                              const std::string& name) {
  ExpertWork work = nb::cast<const Context&>(context_).expert_work(bank, x, weights, ids, out);
  const auto poison = [out = work.out] { std::ranges::fill(out, std::numeric_limits<double>::quiet_NaN()); };
  const int slot = handshake_->add({.name = name,
                                    .run = [run = std::move(work.run)](handshake::Progress& progress) { run(progress.counter()); },
                                    .poison = poison});
  std::ranges::move(work.uses, std::back_inserter(uses_));
  return slot;
}

void GpuHandshake::submit(int slot, std::uintptr_t stream) {
  const nb::gil_scoped_release release;
  handshake_->submit(slot, stream_of(stream));
}

void GpuHandshake::wait(int slot, std::uintptr_t stream) {
  const nb::gil_scoped_release release;
  handshake_->wait(slot, stream_of(stream));
}

void bind_handshake(nb::module_& module) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  nb::exception<handshake::DriverError>(module, "DriverError", PyExc_RuntimeError);
  nb::exception<handshake::HandshakeError>(module, "HandshakeError", PyExc_RuntimeError);

  nb::enum_<Vendor>(module, "Vendor", "Whose GPU driver.").value("Cuda", Vendor::Cuda).value("Rocm", Vendor::Rocm);
  nb::enum_<Mechanism>(module, "Mechanism", "How a stream and the CPU wait for each other, best first.")
      .value("MemoryOperations", Mechanism::MemoryOperations)
      .value("HostCallbacks", Mechanism::HostCallbacks)
      .value("StreamSynchronization", Mechanism::StreamSynchronization);

  nb::class_<Finding>(module, "HandshakeFinding", "What the probe of one mechanism found.")
      .def_ro("mechanism", &Finding::mechanism)
      .def_ro("name", &Finding::name)
      .def_ro("eager", &Finding::eager, "Whether it works on a stream.")
      .def_ro("graph", &Finding::graph, "Whether it works in a replayed graph.")
      .def_ro("reason", &Finding::reason, "Why not both; empty: it does both.")
      .def_ro("hung", &Finding::hung, "Nothing ended it: do no more with this device in this process.");
  nb::class_<Choice>(module, "HandshakeChoice", "The best mechanism of this machine, and what was found.")
      .def_ro("mechanism", &Choice::mechanism)
      .def_ro("capturable", &Choice::capturable)
      .def_ro("findings", &Choice::findings);

  nb::class_<Driver>(module, "GpuDriver", "A GPU driver's library, opened at run time.")
      .def(nb::new_(&Driver::open), nb::arg("vendor"), nb::arg("path") = "", nb::arg("device") = 0,
           "path: the library; empty: the one that is loaded already, else the system's. Raises DriverError.")
      .def_prop_ro("vendor", &Driver::vendor)
      .def("probe",
           [](const std::shared_ptr<Driver>& driver, Mechanism mechanism, int layers, int rounds, double seconds) {
             return handshake::probe(driver, mechanism, probe_options(layers, rounds, seconds));
           },
           nb::arg("mechanism"), nb::arg("layers") = 60, nb::arg("rounds") = 4, nb::arg("time_limit_seconds") = 10.0,
           Unlocked(), "Try one mechanism, eagerly and in a graph of about 7 nodes for each layer.")
      .def("choose",
           [](const std::shared_ptr<Driver>& driver, int layers, int rounds, double seconds) {
             return handshake::choose(driver, probe_options(layers, rounds, seconds));
           },
           nb::arg("layers") = 60, nb::arg("rounds") = 4, nb::arg("time_limit_seconds") = 10.0, Unlocked(),
           "The first mechanism that works in graphs, else the first that works. DriverError if none does, or one "
           "hung the device.");

  nb::class_<GpuHandshake>(module, "GpuHandshake",
                           "Experts on the CPU between the operations of a GPU stream. For each slot submits and "
                           "waits alternate. Destroy graphs that have captured them first.")
      .def(nb::init<std::shared_ptr<Driver>, nb::handle_t<Context>, Mechanism, bool, double>(), nb::arg("driver"),
           nb::arg("context"), nb::arg("mechanism"), nb::arg("capturable"), nb::arg("stall_limit_seconds") = 30.0)
      .def_prop_ro("name", &GpuHandshake::name)
      .def_prop_ro("capturable", &GpuHandshake::capturable)
      .def_prop_ro("slots", &GpuHandshake::slots)
      .def("add_experts", &GpuHandshake::add_experts, nb::arg("bank"), nb::arg("x"), nb::arg("weights"),
           nb::arg("ids"), nb::arg("out"), nb::arg("name"),
           "A slot whose job reads x float32 [T, H], weights float32 [T, K], ids int32 [T, K] and writes out "
           "float64 [T, H], all in pinned memory. Not while a stream is captured. Returns its number.")
      .def("submit", &GpuHandshake::submit, nb::arg("slot"), nb::arg("stream"),
           "The job may start when the stream gets here. Raises HandshakeError after a failure.")
      .def("wait", &GpuHandshake::wait, nb::arg("slot"), nb::arg("stream"),
           "What the stream does from here on comes after the job.")
      .def("announce", &GpuHandshake::announce, nb::arg("handshakes"),
           "A graph with so many submits is about to be launched: the watchdog looks for them.")
      .def("check", &GpuHandshake::check,
           "Raise HandshakeError if a job failed or nothing moves. Call when the stream is synchronised, before "
           "its results are used.")
      .def("clear", &GpuHandshake::clear, "Forget a failed job. The streams must be idle.")
      .def("close", &GpuHandshake::close, "Let the device and the workers finish. RuntimeError if a job never ends.");
}

}  // namespace ft::py
