#include "bindings/context.h"

#include <algorithm>
#include <array>
#include <list>
#include <utility>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "core/topology.h"
#include "ops/kernel_set.h"
#include "ops/placement.h"
#include "ops/read_bandwidth.h"

namespace ft::py {
namespace {

using Floats1 = View<const float, 1>;
using Floats2 = View<const float, 2>;
using Floats3 = View<const float, 3>;
using Floats4 = View<const float, 4>;

constexpr int kMaxThreads = 1024;
constexpr std::int64_t kAny = -1;

// Native work without the GIL.
template <class Work>
void unlocked(Work work) {
  const nb::gil_scoped_release release;
  work();
}

// Numbers that say where memory is read or written. They are checked whenever an operator runs, also when it
// is replayed: only then are they known.
template <class T>
struct Indices {
  const char* name;
  const T* values;
  std::int64_t count;

  // Every value must lie in [low, high).
  void check(std::int64_t low, std::int64_t high) const {
    for (std::int64_t i = 0; i < count; ++i) {
      if (values[i] < low || values[i] >= high) {
        refuse_array(name, std::to_string(values[i]) + " at position " + std::to_string(i),
                     "numbers from " + std::to_string(low) + " to " + std::to_string(high - 1));
      }
    }
  }
};

template <class T, int N>
Indices<std::remove_const_t<T>> indices(const View<T, N>& view) {
  return {view.name(), view.data(), view.size()};
}

// Every page that a token will read must exist.
void check_pages(const AttentionArgs& args, std::int64_t sequences, std::int64_t pages) {
  Indices<std::int32_t>{"sequence", args.sequence, args.tokens}.check(-1, sequences);
  Indices<std::int32_t>{"positions", args.positions, args.tokens}.check(0, args.max_pages * args.page_tokens);
  for (std::int64_t t = 0; t < args.tokens; ++t) {
    if (args.sequence[t] < 0) continue;
    const std::int32_t* row = args.block_table + args.sequence[t] * args.max_pages;
    const std::int64_t used = args.positions[t] / args.page_tokens + 1;
    // Tokens of one sequence share their pages: only the furthest of a run needs the look.
    if (t + 1 < args.tokens && args.sequence[t + 1] == args.sequence[t] &&
        args.positions[t + 1] >= args.positions[t]) {
      continue;
    }
    const bool ok = std::all_of(row, row + used, [&](std::int32_t page) { return page >= 0 && page < pages; });
    if (!ok) {
      refuse_array("block_table", "a page out of range for sequence " + std::to_string(args.sequence[t]),
                   "pages from 0 to " + std::to_string(pages - 1));
    }
  }
}

// The arrays of an expert call, checked against the bank and each other.
struct ExpertCall {
  ExpertCall(const Bank& bank, Array x_array, Array weights_array, Array ids_array, Array out_array)
      : bank(bank), arrays{x_array, weights_array, ids_array, out_array}, x("x", x_array),
        weights("weights", weights_array), ids("ids", ids_array), out("out", out_array) {
    x.expect({kAny, bank.hidden()});
    weights.expect({x.shape(0), kAny});
    ids.expect_like(weights);
    out.expect({x.shape(0), bank.hidden()});
  }

  ExpertArgs args() const {
    return {&bank.bank, x.data(), ids.data(), weights.data(), out.data(), x.shape(0), ids.shape(1)};
  }

  std::vector<nb::object> uses(nb::handle bank_object) const {
    std::vector<nb::object> objects{nb::borrow(bank_object)};
    for (const Array array : arrays) objects.push_back(nb::borrow(array.object));
    return objects;
  }

  const Bank& bank;
  const std::array<Array, 4> arrays;
  Floats2 x, weights;
  View<const std::int32_t, 2> ids;
  View<double, 2> out;
};

bool has_routes(const ExpertArgs& args) {
  for (std::int64_t i = 0; i < args.tokens * args.top_k; ++i) {
    if (args.ids[i] >= 0 && args.weights[i] != 0.0f) return true;
  }
  return false;
}

}  // namespace

Pending::~Pending() {
  if (done()) return;
  try {   // the work reads and writes the arrays that are released here
    unlocked([&] { pool_->wait(*ticket_); });
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    PyErr_WriteUnraisable(nullptr);
  }
}

void Pending::wait() {
  unlocked([&] { pool_->wait(*ticket_); });
}

Context::Context(std::optional<int> threads, const std::optional<std::string>& isa, Precision activations)
    : kernels_(&select_kernels(isa ? isa->c_str() : nullptr, activations)) {
  if (threads && (*threads < 1 || *threads > kMaxThreads)) {
    throw nb::value_error(("threads: found " + std::to_string(*threads) + ", expected 1 to " +
                           std::to_string(kMaxThreads)).c_str());
  }
  places_ = plan_threads(threads.value_or(0), physical_cores(allowed_cpus()), cpu_quota());
  pool_ = std::make_shared<ThreadPool>(places_);
}

std::vector<int> Context::cpus() const {
  std::vector<int> cpus;
  for (const Place& place : places_) cpus.push_back(place.cpu);
  return cpus;
}

std::vector<int> Context::nodes() const {
  std::vector<int> nodes;
  for (const Place& place : places_) nodes.push_back(place.node);
  return nodes;
}

const char* Context::isa() const { return kernels_->isa; }

std::vector<std::string> Context::formats() const {
  std::vector<std::string> names;
  for (int i = 0; i < kFormatCount; ++i) {
    if (kernels_->formats[i].dot != nullptr) names.emplace_back(format_info(static_cast<Format>(i)).name);
  }
  return names;
}

std::shared_ptr<ThreadPool> Context::pool() const {
  if (pool_ == nullptr) throw std::runtime_error("this Context has been closed; make a new one");
  return pool_;
}

void Context::close() {
  auto last = std::move(pool_);   // work under way holds the pool too, and is finished first
  unlocked([&] { last.reset(); });
}

void Context::place(nb::handle_t<Bank> bank, bool mapped) const {
  const ExpertBank& experts = nb::cast<const Bank&>(bank).bank;
  const auto pool = this->pool();
  unlocked([&] { ft::place(*pool, *kernels_, experts, mapped ? Memory::Mapped : Memory::Fresh); });
}

void Context::place_matrix(nb::handle_t<Matrix> matrix) const {
  const PackedMatrix& w = nb::cast<const Matrix&>(matrix).packed;
  const auto pool = this->pool();
  unlocked([&] { ft::place(*pool, w, Memory::Mapped); });
}

void Context::linear(nb::tuple matrices, Array x_array, nb::tuple biases, nb::tuple outs) const {
  const Floats2 x("x", x_array);
  if (biases.size() != matrices.size() || outs.size() != matrices.size()) {
    throw nb::value_error("linear: found unequal numbers of matrices, biases and outputs, expected one of each");
  }
  std::vector<LinearPart> parts;
  std::list<View<float, 2>> out_views;   // views stay where they are
  std::list<Floats1> bias_views;
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const PackedMatrix& w = nb::cast<const Matrix&>(matrices[i]).packed;
    x.expect({kAny, w.cols});
    out_views.emplace_back("out", Array{outs[i].ptr()}).expect({x.shape(0), w.rows});
    const float* bias = nullptr;
    if (!biases[i].is_none()) {
      bias_views.emplace_back("bias", Array{biases[i].ptr()}).expect({w.rows});
      bias = bias_views.back().data();
    }
    parts.push_back({&w, bias, out_views.back().data()});
  }
  std::vector<nb::handle> uses{x_array.object, matrices, biases, outs};
  perform(uses, [kernels = kernels_, parts, x = x.data(), tokens = x.shape(0)](ThreadPool& pool) {
    ft::linear(pool, *kernels, parts, x, tokens);
  });
}

void Context::embed(nb::handle_t<Matrix> matrix, Array ids_array, Array out_array) const {
  const PackedMatrix& w = nb::cast<const Matrix&>(matrix).packed;
  const View<const std::int64_t, 1> ids("ids", ids_array);
  const View<float, 2> out("out", out_array);
  out.expect({ids.shape(0), w.cols});
  perform({matrix, ids_array.object, out_array.object},
          [kernels = kernels_, &w, ids = indices(ids), out = out.data()](ThreadPool& pool) {
            ids.check(0, w.rows);
            ft::embed(pool, *kernels, w, ids.values, out, ids.count);
          });
}

void Context::rms_norm(Array x_array, Array weight_array, float eps, Array out_array) const {
  const Floats2 x("x", x_array);
  const Floats1 weight("weight", weight_array);
  const View<float, 2> out("out", out_array);
  weight.expect({x.shape(1)});
  out.expect_like(x);
  perform({x_array.object, weight_array.object, out_array.object},
          [kernels = kernels_, x = x.data(), weight = weight.data(), eps, out = out.data(), rows = x.shape(0),
           n = x.shape(1)](ThreadPool& pool) { ft::rms_norm(pool, *kernels, x, weight, eps, out, rows, n); });
}

void Context::add_rms_norm(Array x_array, Array residual_array, Array weight_array, float eps,
                           Array out_array) const {
  const Floats2 x("x", x_array);
  const View<float, 2> residual("residual", residual_array);
  const Floats1 weight("weight", weight_array);
  const View<float, 2> out("out", out_array);
  residual.expect_like(x);
  weight.expect({x.shape(1)});
  out.expect_like(x);
  perform({x_array.object, residual_array.object, weight_array.object, out_array.object},
          [kernels = kernels_, x = x.data(), residual = residual.data(), weight = weight.data(), eps,
           out = out.data(), rows = x.shape(0), n = x.shape(1)](ThreadPool& pool) {
            ft::add_rms_norm(pool, *kernels, x, residual, weight, eps, out, rows, n);
          });
}

void Context::gated_activation(Array gate_array, Array up_array, Activation activation, float alpha, float limit,
                               Array out_array) const {
  const Floats2 gate("gate", gate_array);
  const Floats2 up("up", up_array);
  const View<float, 2> out("out", out_array);
  up.expect_like(gate);
  out.expect_like(gate);
  perform({gate_array.object, up_array.object, out_array.object},
          [kernels = kernels_, kind = GatedActivation{activation, alpha, limit}, gate = gate.data(),
           up = up.data(), out = out.data(), n = gate.size()](ThreadPool& pool) {
            ft::gated_activation(pool, *kernels, kind, gate, up, out, n);
          });
}

void Context::rotary(Array q_array, Array k_array, Array cos_array, Array sin_array, bool interleaved) const {
  const View<float, 3> q("q", q_array);
  const View<float, 3> k("k", k_array);
  const Floats2 cos("cos", cos_array);
  const Floats2 sin("sin", sin_array);
  k.expect({q.shape(0), kAny, q.shape(2)});
  cos.expect({q.shape(0), kAny});
  sin.expect_like(cos);
  if (2 * cos.shape(1) > q.shape(2)) {
    cos.refuse(std::to_string(cos.shape(1)) + " angles", "at most half of the head's " + std::to_string(q.shape(2)));
  }
  const RotaryArgs args{q.data(), k.data(), cos.data(), sin.data(), q.shape(0), q.shape(1), k.shape(1),
                        q.shape(2), 2 * cos.shape(1), interleaved};
  perform({q_array.object, k_array.object, cos_array.object, sin_array.object},
          [kernels = kernels_, args](ThreadPool& pool) { ft::rotary(pool, *kernels, args); });
}

void Context::write_kv(Array k_array, Array v_array, Array k_cache_array, Array v_cache_array,
                       Array slots_array) const {
  const Floats3 k("k", k_array);
  const Floats3 v("v", v_array);
  const View<float, 4> k_cache("k_cache", k_cache_array);
  const View<float, 4> v_cache("v_cache", v_cache_array);
  const View<const std::int64_t, 1> slots("slots", slots_array);
  v.expect_like(k);
  k_cache.expect({kAny, kAny, k.shape(1), k.shape(2)});
  v_cache.expect_like(k_cache);
  slots.expect({k.shape(0)});
  perform({k_array.object, v_array.object, k_cache_array.object, v_cache_array.object, slots_array.object},
          [k = k.data(), v = v.data(), k_cache = k_cache.data(), v_cache = v_cache.data(),
           slots = indices(slots), row = k.shape(1) * k.shape(2),
           all_slots = k_cache.shape(0) * k_cache.shape(1)](ThreadPool&) {
            slots.check(0, all_slots);
            ft::write_kv(k, v, k_cache, v_cache, slots.values, slots.count, row);
          });
}

void Context::paged_attention(Array q_array, Array k_cache_array, Array v_cache_array, Array table_array,
                              Array sequence_array, Array positions_array, float scale,
                              std::optional<std::int64_t> window, std::optional<Array> sinks_array,
                              Array out_array) const {
  const Floats3 q("q", q_array);
  const Floats4 k_cache("k_cache", k_cache_array);
  const Floats4 v_cache("v_cache", v_cache_array);
  const View<const std::int32_t, 2> table("block_table", table_array);
  const View<const std::int32_t, 1> sequence("sequence", sequence_array);
  const View<const std::int32_t, 1> positions("positions", positions_array);
  const View<float, 3> out("out", out_array);
  k_cache.expect({kAny, kAny, kAny, q.shape(2)});
  v_cache.expect_like(k_cache);
  sequence.expect({q.shape(0)});
  positions.expect_like(sequence);
  out.expect_like(q);
  const std::int64_t page_tokens = k_cache.shape(1);
  const std::int64_t kv_heads = k_cache.shape(2);
  if (kv_heads == 0 || q.shape(1) % kv_heads != 0) {
    q.refuse(std::to_string(q.shape(1)) + " heads", "a multiple of the " + std::to_string(kv_heads) + " key heads");
  }
  std::optional<Floats1> sinks;
  if (sinks_array) {
    sinks.emplace("sinks", *sinks_array);
    sinks->expect({q.shape(1)});
  }
  if (window && *window < 1) throw nb::value_error("window: expected at least 1, or None for no window");
  const AttentionArgs args{q.data(), k_cache.data(), v_cache.data(), table.data(), sequence.data(),
                           positions.data(), out.data(), q.shape(0), q.shape(1), kv_heads, q.shape(2),
                           page_tokens, table.shape(1), scale, window.value_or(0),
                           sinks ? sinks->data() : nullptr};
  std::vector<nb::handle> uses;
  for (const Array array : {q_array, k_cache_array, v_cache_array, table_array, sequence_array, positions_array,
                            out_array}) {
    uses.emplace_back(array.object);
  }
  if (sinks_array) uses.emplace_back(sinks_array->object);
  perform(uses, [kernels = kernels_, args, sequences = table.shape(0), pages = k_cache.shape(0)](ThreadPool& pool) {
    check_pages(args, sequences, pages);
    ft::paged_attention(pool, *kernels, args);
  });
}

void Context::route_topk(Array logits_array, bool renormalize, Array weights_array, Array ids_array) const {
  const Floats2 logits("logits", logits_array);
  const View<float, 2> weights("weights", weights_array);
  const View<std::int32_t, 2> ids("ids", ids_array);
  weights.expect({logits.shape(0), kAny});
  ids.expect_like(weights);
  const std::int64_t top_k = weights.shape(1);
  if (top_k < 1 || top_k > logits.shape(1)) {
    weights.refuse("top_k " + std::to_string(top_k), "1 to the " + std::to_string(logits.shape(1)) + " experts");
  }
  perform({logits_array.object, weights_array.object, ids_array.object},
          [logits = logits.data(), tokens = logits.shape(0), experts = logits.shape(1), top_k, renormalize,
           weights = weights.data(), ids = ids.data()](ThreadPool&) {
            ft::route_topk(logits, tokens, experts, top_k, renormalize, weights, ids);
          });
}

void Context::experts(nb::handle_t<Bank> bank, Array x, Array weights, Array ids, Array out) const {
  const ExpertCall call(nb::cast<const Bank&>(bank), x, weights, ids, out);
  perform({bank, x.object, weights.object, ids.object, out.object},
          [kernels = kernels_, args = call.args(), ids = indices(call.ids), experts = call.bank.experts()](
              ThreadPool& pool) {
            ids.check(-1, experts);
            const auto task = make_expert_task(*kernels, args, pool.teams());
            pool.run(*task);
          });
}

void Context::to_float32(Array x_array, Array out_array) const {
  const View<const double, 2> x("x", x_array);
  const View<float, 2> out("out", out_array);
  out.expect_like(x);
  perform({x_array.object, out_array.object}, [x = x.data(), out = out.data(), n = x.size()](ThreadPool&) {
    std::transform(x, x + n, out, [](double v) { return static_cast<float>(v); });
  });
}

void Context::start_recording() {
  if (recording_ != nullptr) throw std::runtime_error("this Context is recording already");
  recording_ = std::make_shared<Recording>();
}

std::shared_ptr<Recording> Context::stop_recording() {
  if (recording_ == nullptr) throw std::runtime_error("this Context is not recording");
  return std::move(recording_);
}

void Context::replay(const Recording& recording) const {
  const auto pool = this->pool();
  unlocked([&] {
    for (const auto& work : recording.work) work(*pool);
  });
}

void Context::perform(std::span<const nb::handle> uses, std::function<void(ThreadPool&)> work) const {
  const auto pool = this->pool();
  unlocked([&] { work(*pool); });
  if (recording_ == nullptr) return;
  for (const nb::handle object : uses) recording_->uses.push_back(nb::borrow(object));
  recording_->work.push_back(std::move(work));
}

void Context::perform(std::initializer_list<nb::handle> uses, std::function<void(ThreadPool&)> work) const {
  perform(std::span(uses.begin(), uses.size()), std::move(work));
}

std::unique_ptr<Pending> Context::experts_submit(nb::handle_t<Bank> bank, Array x, Array weights,
                                                 Array ids, Array out) const {
  const ExpertCall call(nb::cast<const Bank&>(bank), x, weights, ids, out);
  indices(call.ids).check(-1, call.bank.experts());
  if (recording_ != nullptr) throw std::runtime_error("submitted work cannot be recorded");
  auto pool = this->pool();
  std::shared_ptr<ThreadPool::Ticket> ticket;
  unlocked([&] {
    if (has_routes(call.args())) {
      ticket = pool->submit(make_expert_task(*kernels_, call.args(), pool->teams()));
    } else {   // nothing to compute: no worker is woken
      std::fill_n(call.out.data(), call.out.size(), 0.0);
      ticket = ThreadPool::completed();
    }
  });
  return std::make_unique<Pending>(std::move(pool), std::move(ticket), call.uses(bank));
}

ExpertWork Context::expert_work(nb::handle_t<Bank> bank, Array x, Array weights, Array ids, Array out) const {
  const ExpertCall call(nb::cast<const Bank&>(bank), x, weights, ids, out);
  const std::span result(call.out.data(), static_cast<std::size_t>(call.out.size()));
  auto run = [pool = pool(), kernels = kernels_, args = call.args(), ids = indices(call.ids),
              experts = call.bank.experts(), result](std::atomic<std::uint64_t>& progress) {
    ids.check(-1, experts);
    if (!has_routes(args)) return std::ranges::fill(result, 0.0), void();   // no worker is woken
    ExpertArgs watched = args;
    watched.progress = &progress;
    const auto task = make_expert_task(*kernels, watched, pool->teams());
    pool->run(*task);
  };
  return {std::move(run), result, call.uses(bank)};
}

std::uint64_t Context::read_bytes(Array data_array) const {
  const View<const std::uint8_t, 1> data("data", data_array);
  const auto pool = this->pool();
  std::uint64_t sum = 0;
  unlocked([&] { sum = ft::read_bytes(*pool, data.data(), data.size()); });
  return sum;
}

void bind_context(nb::module_& module) {
  nb::class_<Pending>(module, "Pending", "Expert work under way. Keeps its arrays alive.")
      .def("wait", &Pending::wait, "Block until the output is written. May be called again.")
      .def_prop_ro("done", &Pending::done);

  nb::enum_<Precision>(module, "Precision", "How quantised weights read activations.")
      .value("Int8", Precision::Int8, "Rounded to int8 in blocks of 32; products are exact integers.")
      .value("Exact", Precision::Exact, "As float32, times dequantised weights.");

  nb::class_<Recording>(module, "Recording", "Operators that ran, to be run again on the same arrays.");

  nb::class_<Context>(module, "Context",
                      "A worker pool and the kernels of one instruction set. The operators write into "
                      "arrays that the caller gives; freetoken.kernels.base says what each computes.")
      .def(nb::init<std::optional<int>, const std::optional<std::string>&, Precision>(),
           nb::arg("threads") = nb::none(), nb::arg("isa") = nb::none(), nb::arg("activations") = Precision::Int8,
           "threads: default one per physical core within the affinity mask and the cgroup's quota. "
           "isa: default the best of detected_isas().")
      .def_prop_ro("isa", &Context::isa)
      .def_prop_ro("threads", &Context::threads)
      .def_prop_ro("cpus", &Context::cpus, "The CPU of each thread; -1: not pinned.")
      .def_prop_ro("nodes", &Context::nodes, "The NUMA node of each thread; 0 for one that is not pinned.")
      .def_prop_ro("formats", &Context::formats, "Names of the weight formats that have kernels here.")
      .def("close", &Context::close, "Finish what was submitted and end the threads.")
      .def("place", &Context::place, nb::arg("bank"), nb::arg("mapped"),
           "Have each page of the experts touched first by a thread of the NUMA node that will read it, where "
           "the threads have more than one. mapped: they are a file's bytes, only read here; else memory that "
           "nobody else uses yet.")
      .def("place_matrix", &Context::place_matrix, nb::arg("matrix"), "The same for a matrix of a mapped file.")
      .def("linear", &Context::linear, nb::arg("matrices"), nb::arg("x"), nb::arg("biases"), nb::arg("outs"),
           nb::sig("def linear(self, matrices: tuple[Matrix, ...], x: torch.Tensor | "
                   "numpy.typing.NDArray[typing.Any], biases: tuple[typing.Any, ...], outs: tuple[typing.Any, ...]) "
                   "-> None"))
      .def("embed", &Context::embed, nb::arg("w"), nb::arg("ids"), nb::arg("out"))
      .def("rms_norm", &Context::rms_norm, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("out"))
      .def("add_rms_norm", &Context::add_rms_norm, nb::arg("x"), nb::arg("residual"), nb::arg("weight"),
           nb::arg("eps"), nb::arg("out"))
      .def("gated_activation", &Context::gated_activation, nb::arg("gate"), nb::arg("up"), nb::arg("activation"),
           nb::arg("alpha"), nb::arg("limit"), nb::arg("out"))
      .def("rotary", &Context::rotary, nb::arg("q"), nb::arg("k"), nb::arg("cos"), nb::arg("sin"),
           nb::arg("interleaved"))
      .def("write_kv", &Context::write_kv, nb::arg("k"), nb::arg("v"), nb::arg("k_cache"), nb::arg("v_cache"),
           nb::arg("slots"))
      .def("paged_attention", &Context::paged_attention, nb::arg("q"), nb::arg("k_cache"), nb::arg("v_cache"),
           nb::arg("block_table"), nb::arg("sequence"), nb::arg("positions"), nb::arg("scale"),
           nb::arg("window").none(), nb::arg("sinks").none(), nb::arg("out"))
      .def("route_topk", &Context::route_topk, nb::arg("logits"), nb::arg("renormalize"), nb::arg("weights"),
           nb::arg("ids"))
      .def("experts", &Context::experts, nb::arg("bank"), nb::arg("x"), nb::arg("weights"), nb::arg("ids"),
           nb::arg("out"))
      .def("to_float32", &Context::to_float32, nb::arg("x"), nb::arg("out"))
      .def("start_recording", &Context::start_recording,
           "Remember the operators that run from now on. One thread at a time may use the Context meanwhile.")
      .def("stop_recording", &Context::stop_recording)
      .def("replay", &Context::replay, nb::arg("recording"),
           "Run the operators again, in their order, on the arrays they had: they read what these hold now.")
      .def("experts_submit", &Context::experts_submit, nb::arg("bank"), nb::arg("x"), nb::arg("weights"),
           nb::arg("ids"), nb::arg("out"))
      .def("read_bytes", &Context::read_bytes, nb::arg("data"),
           "Read uint8 [n] once with all threads; the sum of its 64-bit words. For measuring the "
           "read bandwidth.");
}

}  // namespace ft::py
