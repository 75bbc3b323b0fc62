// Experts and linear on machines with several NUMA nodes. The machines are faked: trees under a temporary
// directory say what cores there are, and the threads run wherever this host lets them.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "core/pool.h"
#include "core/topology.h"
#include "experts_support.h"
#include "fake_root.h"
#include "ops/kernel_set.h"
#include "ops/ops.h"
#include "ops/placement.h"
#include "weights.h"

using namespace experts;

namespace {

// The places of `threads` threads (0: all cores) on a machine whose nodes have these CPUs, unpinned.
std::vector<ft::Place> places_on(const std::vector<std::string>& nodes, int threads) {
  const FakeRoot root;
  for (std::size_t node = 0; node < nodes.size(); ++node) root.node(static_cast<int>(node), nodes[node]);
  for (int cpu = 0; cpu < 16; ++cpu) root.siblings(cpu, std::to_string(cpu % 8) + "," + std::to_string(cpu % 8 + 8));
  const std::vector<int> allowed{0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14};   // neither 7 nor its sibling
  std::vector<ft::Place> places =
      ft::plan_threads(threads, ft::physical_cores(allowed, root.path()), std::nullopt);
  for (ft::Place& place : places) place.cpu = -1;   // such CPUs need not exist here
  return places;
}

struct Machine {
  std::vector<std::string> nodes;
  std::size_t teams;
};

const Machine kOne{{"0-15"}, 1};
const Machine kTwo{{"0-3,8-11", "", "4-7,12-15"}, 2};   // four cores and three; node 1 is memory alone
const Machine kThree{{"0,8", "1-4,9-12", "5-7,13-15"}, 3};

std::map<std::thread::id, int> lanes_of_threads(ft::ThreadPool& pool) {
  struct Who final : ft::Task {
    std::mutex mutex;
    std::map<std::thread::id, int> lanes;
    void run(ft::Lane& lane) override {
      const std::lock_guard lock(mutex);
      lanes[std::this_thread::get_id()] = lane.index();
    }
  } who;
  pool.run(who);
  return who.lanes;
}

bool overlap(std::vector<ft::Bytes> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](ft::Bytes a, ft::Bytes b) { return a.data() < b.data(); });
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i - 1].data() + ranges[i - 1].size() > ranges[i].data()) return true;
  }
  return false;
}

// Rows that were asked of the kernels, and by which thread.
struct Call {
  std::thread::id thread;
  ft::Bytes codes;
};

struct Recorder {
  std::mutex mutex;
  std::vector<Call> calls;
  std::set<std::thread::id> threads;
  std::size_t lanes = 1;   // as many threads have to come before one goes on
} recorder;

// float32 weights with the scalar kernel, every call recorded.
void recorded_dot(const ft::PackedMatrix& w, std::int64_t r0, std::int64_t r1, const ft::Activations& x,
                  const ft::TokenRange& tokens, float* y, std::int64_t y_stride) {
  {
    const std::lock_guard lock(recorder.mutex);
    const ft::Bytes codes{w.codes + r0 * w.code_row_stride, static_cast<std::size_t>((r1 - r0) * w.code_row_stride)};
    recorder.calls.push_back({std::this_thread::get_id(), codes});
    recorder.threads.insert(std::this_thread::get_id());
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (std::chrono::steady_clock::now() < end) {
    {
      const std::lock_guard lock(recorder.mutex);
      if (recorder.threads.size() >= recorder.lanes) break;
    }
    std::this_thread::yield();
  }
  ft::scalar_kernels(ft::Precision::Int8).format(Format::F32).dot(w, r0, r1, x, tokens, y, y_stride);
}

KernelSet recording_kernels(int lanes) {
  recorder.calls.clear();
  recorder.threads.clear();
  recorder.lanes = static_cast<std::size_t>(lanes);
  KernelSet kernels = ft::scalar_kernels(ft::Precision::Int8);
  kernels.formats[static_cast<int>(Format::F32)].dot = recorded_dot;
  return kernels;
}

// Which team was asked to place each byte; a byte may have one team alone.
class Placed {
 public:
  explicit Placed(ft::ThreadPool& pool) : teams_(pool.teams()), lanes_(lanes_of_threads(pool)) {}

  ft::Touch touch() {
    return [this](const ft::Team& team, ft::Bytes range) {
      const std::lock_guard lock(mutex_);
      const int lane = lanes_.at(std::this_thread::get_id());
      on_its_lanes_ = on_its_lanes_ && lane >= team.first && lane < team.first + team.lanes;
      ranges_.push_back({range, team.node});
    };
  }

  void check(const ft::PackedMatrix& m) const {   // float32: every byte of it has its node
    for (std::int64_t at = 0; at < m.rows * m.code_row_stride; at += 4) CHECK(node_of(m.codes + at) >= 0);
  }
  void check_lanes() const { CHECK(on_its_lanes_); }

  int node_of(const std::uint8_t* byte) const {   // -1: was not placed
    int node = -1;
    for (const auto& [range, its] : ranges_) {
      if (byte < range.data() || byte >= range.data() + range.size()) continue;
      if (node >= 0) throw std::logic_error("a byte was placed twice");
      node = its;
    }
    return node;
  }

  // In every phase (`phase` of an address) each lane begins with rows of its own node, and goes to no such
  // rows again after it has taken others. No row is asked for twice, nor with rows of another node.
  template <class Phase>
  void check_calls(const Phase& phase, int phases) const {
    std::set<std::pair<int, int>> begun, helps;
    std::vector<ft::Bytes> rows;
    for (const Call& call : recorder.calls) {
      const int lane = lanes_.at(call.thread);
      const std::pair key{lane, phase(call.codes.data())};
      const int node = node_of(call.codes.data());
      const bool own = node == teams_[ft::team_of(teams_, lane)].node;
      CHECK_EQ(node_of(&call.codes.back()), node);
      rows.push_back(call.codes);
      if (begun.insert(key).second) CHECK(own);
      if (!own) helps.insert(key);
      CHECK(!own || !helps.contains(key));
    }
    CHECK(!overlap(rows));
    CHECK_EQ(begun.size(), lanes_.size() * static_cast<std::size_t>(phases));
  }

 private:
  const std::span<const ft::Team> teams_;
  const std::map<std::thread::id, int> lanes_;
  std::mutex mutex_;
  std::vector<std::pair<ft::Bytes, int>> ranges_;
  bool on_its_lanes_ = true;
};

std::vector<float> linear(ft::ThreadPool& pool, const KernelSet& kernels, std::span<const Weights> matrices,
                          const std::vector<float>& x, std::int64_t tokens) {
  std::int64_t rows = 0;
  for (const Weights& w : matrices) rows += w.matrix.rows;
  std::vector<float> y(static_cast<std::size_t>(rows * tokens), -1.0f);
  std::vector<ft::LinearPart> parts;
  float* out = y.data();
  for (const Weights& w : matrices) {
    parts.push_back({&w.matrix, nullptr, out});
    out += w.matrix.rows * tokens;
  }
  ft::linear(pool, kernels, parts, x.data(), tokens);
  return y;
}

}  // namespace

TEST(experts_get_the_same_bits_on_threads_of_any_nodes) {
  // K-quants cut gate and up at 256 rows: some nodes have none of the 512. A batch of 1100 tokens has small
  // tiles of down's rows.
  const struct {
    Format format;
    Shape shape;
    std::int64_t tokens;
  } cases[] = {{Format::F32, {3, 96, 224}, 2},
               {Format::Q4_0, {3, 160, 96}, 3},
               {Format::Q4_K, {3, 256, 512}, 2},
               {Format::FP8_128, {3, 160, 288}, 2},
               {Format::Q8_0, {3, 96, 64}, 1100}};
  for (const KernelSet* kernels : weights::kernel_sets()) {
    for (const auto& c : cases) {
      const Layer layer = make_layer(c.format, c.format, c.format, c.shape, c.format != Format::Q8_0, 31);
      const Batch batch = make_batch(c.shape, c.tokens, 2, 5);
      ft::ThreadPool alone(std::vector<int>{-1});
      const std::vector<double> want = run(alone, *kernels, layer, batch);
      for (const Machine& machine : {kOne, kTwo, kThree}) {
        for (const int threads : {2, 3, 0}) {
          ft::ThreadPool pool(places_on(machine.nodes, threads));
          CHECK_EQ(pool.teams().size(), std::min(machine.teams, static_cast<std::size_t>(pool.size())));
          const std::vector<double> y = run(pool, *kernels, layer, batch);
          CHECK(std::memcmp(y.data(), want.data(), y.size() * sizeof y[0]) == 0);
        }
      }
    }
  }
}

TEST(linear_gets_the_same_bits_on_threads_of_any_nodes) {
  for (const KernelSet* kernels : weights::kernel_sets()) {
    constexpr std::int64_t kCols = 256;
    std::vector<Weights> matrices;   // 20 rows are less than a tile: they belong to one node
    for (const auto& [format, rows] : {std::pair{Format::Q4_0, 300}, {Format::F32, 20}, {Format::FP8_128, 417}}) {
      matrices.push_back(random_weights(format, rows, kCols, 41));
    }
    for (const std::int64_t tokens : {1, 3, 150}) {
      const std::vector<float> x = random_floats(tokens * kCols, 42);
      ft::ThreadPool alone(std::vector<int>{-1});
      const std::vector<float> want = linear(alone, *kernels, matrices, x, tokens);
      for (const Machine& machine : {kOne, kTwo, kThree}) {
        for (const int threads : {2, 3, 0}) {
          ft::ThreadPool pool(places_on(machine.nodes, threads));
          const std::vector<float> y = linear(pool, *kernels, matrices, x, tokens);
          CHECK(std::memcmp(y.data(), want.data(), y.size() * 4) == 0);
        }
      }
    }
  }
}

TEST(expert_rows_are_placed_where_threads_take_them_first) {
  const Shape shape{2, 352, 288};   // tiles of 32 rows, enough for every lane of every node
  const Layer layer = make_layer(Format::F32, Format::F32, Format::F32, shape, true, 51);
  Batch batch = make_batch(shape, 3, 2, 52);
  for (const Machine& machine : {kTwo, kThree}) {
    ft::ThreadPool pool(places_on(machine.nodes, 0));
    Placed placed(pool);
    ft::place(pool, ft::scalar_kernels(ft::Precision::Int8), layer.bank, placed.touch());
    placed.check_lanes();
    std::set<const std::uint8_t*> downs;
    for (std::size_t e = 0; e < 2; ++e) {
      for (const auto* part : {&layer.gate, &layer.up, &layer.down}) placed.check((*part)[e].matrix);
      // The activations of gate and up meet in one lane, so their rows have one node.
      for (std::int64_t r = 0; r < shape.inner; ++r) {
        const std::int64_t at = r * layer.gate[e].matrix.code_row_stride;
        CHECK_EQ(placed.node_of(layer.gate[e].matrix.codes + at), placed.node_of(layer.up[e].matrix.codes + at));
      }
    }
    run(pool, recording_kernels(pool.size()), layer, batch);
    const auto is_down = [&](const std::uint8_t* codes) {
      return std::any_of(layer.down.begin(), layer.down.end(), [&](const Weights& w) {
        return codes >= w.matrix.codes && codes < w.matrix.codes + w.matrix.rows * w.matrix.code_row_stride;
      }) ? 1 : 0;
    };
    placed.check_calls(is_down, 2);
  }
}

TEST(a_matrix_is_placed_where_threads_take_its_rows_first) {
  const Weights w = random_weights(Format::F32, 2100, 64, 61);   // several pieces
  const std::vector<float> x = random_floats(2 * 64, 62);
  for (const Machine& machine : {kTwo, kThree}) {
    ft::ThreadPool pool(places_on(machine.nodes, 0));
    Placed placed(pool);
    ft::place(pool, w.matrix, placed.touch());
    placed.check_lanes();
    placed.check(w.matrix);
    linear(pool, recording_kernels(pool.size()), {&w, 1}, x, 2);
    placed.check_calls([](const std::uint8_t*) { return 0; }, 1);
  }
}

// Scales lie in planes, in blocks, or one for 128 rows; each part's bytes end with its last block.
TEST(threads_of_all_nodes_place_every_block_and_nothing_beyond) {
  for (const Format format : weights::kAll) {
    for (const bool planes : {true, false}) {
      const ft::FormatInfo& info = ft::format_info(format);
      const Weights w = random_weights(format, 300, 256, 71, planes);
      const ft::PackedMatrix& m = w.matrix;
      ft::ThreadPool pool(places_on(kThree.nodes, 0));
      std::mutex mutex;
      std::vector<ft::Bytes> ranges;
      ft::place(pool, m, [&](const ft::Team&, ft::Bytes range) {
        const std::lock_guard lock(mutex);
        ranges.push_back(range);
      });
      const auto covered = [&](const std::uint8_t* byte) {
        return std::any_of(ranges.begin(), ranges.end(), [&](const ft::Bytes& r) {
          return byte >= r.data() && byte < r.data() + r.size();
        });
      };
      const bool in_blocks = info.scale_rows == 0 && info.scales_bytes > 0 && m.code_block_stride == info.block_bytes;
      CHECK(in_blocks || !overlap(ranges));   // two teams must not write to one byte
      const std::int64_t blocks = m.cols / info.block_elements;
      const std::int64_t shared_rows = std::max(1, info.scale_rows);
      const std::int64_t row_scales = info.scale_cols > 0 ? (m.cols + info.scale_cols - 1) / info.scale_cols : blocks;
      const std::uint8_t* codes_end = m.codes + (m.rows - 1) * m.code_row_stride +
                                      (blocks - 1) * m.code_block_stride + info.codes_bytes;
      const std::uint8_t* scales_end = m.scales + (m.rows - 1) / shared_rows * m.scale_row_stride +
                                       (row_scales - 1) * m.scale_block_stride + info.scales_bytes;
      for (std::int64_t r = 0; r < m.rows; ++r) {
        CHECK(covered(m.codes + r * m.code_row_stride));
        if (info.scales_bytes > 0) CHECK(covered(m.scales + r / shared_rows * m.scale_row_stride));
      }
      CHECK(covered(codes_end - 1) && (info.scales_bytes == 0 || covered(scales_end - 1)));
      for (const ft::Bytes& range : ranges) {
        const std::uint8_t* end = range.data() + range.size();
        CHECK(end <= codes_end || (info.scales_bytes > 0 && end <= scales_end));
      }
    }
  }
}

TEST(one_node_places_nothing) {
  const Layer layer = make_layer(Format::F32, Format::F32, Format::F32, {2, 64, 64}, true, 81);
  ft::ThreadPool pool(places_on(kOne.nodes, 3));
  const ft::Touch never = [](const ft::Team&, ft::Bytes) { throw std::logic_error("placed"); };
  ft::place(pool, ft::scalar_kernels(ft::Precision::Int8), layer.bank, never);
  ft::place(pool, layer.gate[0].matrix, never);
}

namespace {

// A file of `pages` pages of ones, mapped privately.
class PrivateFile {
 public:
  explicit PrivateFile(std::size_t pages, int protection)
      : page(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))), size(pages * page) {
    std::string name = (std::filesystem::temp_directory_path() / "ft_placement_XXXXXX").string();
    file_ = mkstemp(name.data());
    if (file_ < 0) throw std::runtime_error("mkstemp failed");
    unlink(name.c_str());
    fill(1);
    void* memory = mmap(nullptr, size, protection, MAP_PRIVATE, file_, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("mmap failed");
    data = static_cast<std::uint8_t*>(memory);
  }
  ~PrivateFile() {
    munmap(data, size);
    close(file_);
  }
  void fill(std::uint8_t value) const {
    const std::vector<std::uint8_t> bytes(size, value);
    if (pwrite(file_, bytes.data(), size, 0) != static_cast<ssize_t>(size)) throw std::runtime_error("pwrite failed");
  }

  const std::size_t page, size;
  std::uint8_t* data;

 private:
  int file_;
};

}  // namespace

// A page that was written is a copy of this process: what the file is made to hold later does not reach it.
TEST(fresh_memory_is_written_page_by_page_and_keeps_what_it_holds) {
  PrivateFile file(9, PROT_READ | PROT_WRITE);
  ft::touch_pages({file.data + 2 * file.page + 100, 3 * file.page}, ft::Memory::Fresh);   // pages 2 to 5
  ft::touch_pages({file.data + 8 * file.page - 1, 1}, ft::Memory::Fresh);                // page 7
  ft::touch_pages({file.data, 0}, ft::Memory::Fresh);
  file.fill(2);
  for (std::size_t p = 0; p < 9; ++p) {
    const bool touched = (p >= 2 && p <= 5) || p == 7;
    for (const std::size_t at : {std::size_t{0}, std::size_t{100}, file.page - 1}) {
      CHECK_EQ(int{file.data[p * file.page + at]}, touched ? 1 : 2);
    }
  }
}

TEST(mapped_memory_is_read_page_by_page) {
  PrivateFile file(9, PROT_READ);   // writing would end the program
  ft::touch_pages({file.data, file.size}, ft::Memory::Mapped);
  const auto* nothing = static_cast<std::uint8_t*>(
      mmap(nullptr, file.size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  CHECK(nothing != MAP_FAILED);
  ft::touch_pages({nothing + 2 * file.page + 100, 3 * file.page}, ft::Memory::Mapped);
  unsigned char resident[9] = {};
  CHECK_EQ(mincore(const_cast<std::uint8_t*>(nothing), file.size, resident), 0);
  for (std::size_t p = 0; p < 9; ++p) CHECK_EQ(resident[p] & 1, p >= 2 && p <= 5 ? 1 : 0);
  munmap(const_cast<std::uint8_t*>(nothing), file.size);
}

TEST(placing_a_bank_from_all_threads_leaves_its_bytes_alone) {
  const Shape shape{3, 160, 96};
  const Layer layer = make_layer(Format::Q4_0, Format::FP8_128, Format::Q8_0, shape, true, 91);
  const Batch batch = make_batch(shape, 3, 2, 92);
  const KernelSet& kernels = ft::select_kernels(nullptr);
  ft::ThreadPool pool(places_on(kThree.nodes, 0));
  const std::vector<double> want = run(pool, kernels, layer, batch);
  for (const ft::Memory memory : {ft::Memory::Mapped, ft::Memory::Fresh}) {
    ft::place(pool, kernels, layer.bank, memory);
    for (const Weights& w : layer.gate) ft::place(pool, w.matrix, memory);
    CHECK(run(pool, kernels, layer, batch) == want);
  }
}

FT_TEST_MAIN
