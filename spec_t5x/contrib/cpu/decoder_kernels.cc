// Decoder steps on a CPU: matrix products of few rows, and attention over a cache.
//
// A decoder step reads every weight once for a handful of rows, so it should run at the
// speed of memory. XLA's matrix-vector products use one thread below some size, and its
// products of 2 to 16 rows read weights at a third of that speed; these kernels read them
// as fast as memory gives them, with all threads, for any number of rows.
//
// Every row is computed by the same additions in the same order, however many rows there
// are and however the work is shared out: verifying gamma + 1 tokens gives, bit for bit,
// the logits that decoding them one by one gives.
//
// ``used`` tokens of each row of the batch count, where a block of fewer tokens than it has
// room for is verified: nothing is computed for the others, whose outputs are zeros.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

template <>
struct xla::ffi::CtxBinding<xla::ffi::ThreadPool> {
  using Ctx = xla::ffi::ThreadPool;
};

namespace {

// One register of floats: GCC takes a vector of several through memory. And how many there are.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#else
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
#endif
typedef float Lanes __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint32_t WholeLanes __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint16_t HalfLanes __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

// Not by memcpy: where GCC prefers registers of 32 bytes it copies in halves by way of the
// stack, and a register loaded from two stores waits for both (4 times slower on Ice Lake).
inline Lanes Load(const float* from) { return *reinterpret_cast<const Lanes*>(from); }

// bfloat16 is the upper half of a float. GCC would widen the halves of a register apart.
inline Lanes Load(const uint16_t* from) {
#if defined(__AVX512F__)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#elif defined(__AVX2__)
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
#else
  const HalfLanes halves = *reinterpret_cast<const HalfLanes*>(from);
  return (Lanes)(__builtin_convertvector(halves, WholeLanes) << 16);
#endif
}

inline Lanes Load(const int8_t* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  Lanes lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = from[i];
  return lanes;
#endif
}

// Two weights of 4 bits, -8 to 7: the upper one is of the column half a panel further on.
struct Nibbles {
  int8_t both;
};

inline float Widened(float value) { return value; }

inline float Widened(uint16_t half) {
  const uint32_t whole = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &whole, sizeof(value));
  return value;
}

inline void Store(float* to, Lanes lanes) { *reinterpret_cast<Lanes*>(to) = lanes; }

// a * b + c in one rounding, always: of several loops that should give the same bits, a
// compiler contracts some, and where it thinks FMAs in a row slow (Zen, Sapphire Rapids) not
// others.
inline Lanes Fma(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The same number in all lanes. Of ``Lanes{} + value`` GCC makes an addition first.
inline Lanes Fill(float value) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_set1_ps(value);
#elif defined(__AVX__)
  return (Lanes)_mm256_set1_ps(value);
#else
  return Lanes{} + value;
#endif
}

inline Lanes Fma(float a, Lanes b, Lanes c) { return Fma(Fill(a), b, c); }

// Halves are added until one number is left.
inline float Sum(Lanes lanes) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)lanes);
#else
  float values[kLanes];
  Store(values, lanes);
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) values[i] += values[i + half];
  }
  return values[0];
#endif
}

// Has the compiler hold a value in a register, where it would load it again for each use.
inline void Keep(Lanes& lanes) {
#ifdef __AVX512F__
  asm volatile("" : "+v"(lanes));
#endif
}

inline void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Threads beside the caller's. A step has dozens of pieces of work, microseconds apart: they
// wait for the next one spinning, and sleep when none has come for a while.
class Helpers {
 public:
  // Never destroyed: its threads wait in it until the process ends.
  static Helpers& Of(int64_t num) {
    static Helpers* const helpers = new Helpers(num);
    return *helpers;
  }

  // ``work`` of every piece, here and in the threads; nothing if they are busy with another
  // caller's. The caller works through the pieces itself and waits for nothing but pieces that
  // a thread has begun: it ends without any of them.
  template <typename Work>
  bool Run(int64_t pieces, const Work& work) {
    if (pieces > kMask || is_busy_.exchange(true)) return false;
    constexpr auto kRelaxed = std::memory_order_relaxed;
    call_.store([](const void* work, int64_t piece) { (*static_cast<const Work*>(work))(piece); },
                kRelaxed);
    work_.store(&work, kRelaxed);
    done_.store(0, kRelaxed);
    // A thread that sees the new state sees the values stored above.
    const uint64_t round = state_.load() >> (2 * kBits);
    state_ = (round + 1) << (2 * kBits) | uint64_t(pieces) << kBits;
    if (num_asleep_ > 0) {
      // Who is about to sleep holds it until it does.
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    Help();
    for (int spins = 0; done_.load() < pieces;) {
      if (++spins < 2000) {
        Pause();
      } else {
        std::this_thread::yield();
      }
    }
    is_busy_ = false;
    return true;
  }

 private:
  static constexpr int kBits = 20;
  static constexpr int64_t kMask = (1 << kBits) - 1;
  static constexpr std::chrono::microseconds kPatience{100};

  explicit Helpers(int64_t num) {
    for (int64_t i = 0; i < num; ++i) std::thread([this] { Serve(); }).detach();
  }

  static int64_t Next(uint64_t state) { return state & kMask; }
  static int64_t Pieces(uint64_t state) { return state >> kBits & kMask; }
  bool HasWork() const {
    const uint64_t state = state_;
    return Next(state) < Pieces(state);
  }

  void Help() {
    for (uint64_t state = state_; Next(state) < Pieces(state);) {
      const Call call = call_.load(std::memory_order_relaxed);
      const void* const work = work_.load(std::memory_order_relaxed);
      // If no thread has taken the piece, all of its round's pieces are not done, and what was
      // read above is this round's.
      if (!state_.compare_exchange_weak(state, state + 1)) continue;
      call(work, Next(state));
      done_.fetch_add(1);
      state = state_;
    }
  }

  void Serve() {
    for (;;) {
      Help();
      const auto end = std::chrono::steady_clock::now() + kPatience;
      while (!HasWork() && std::chrono::steady_clock::now() < end) {
        for (int i = 0; i < 16 && !HasWork(); ++i) Pause();
      }
      if (HasWork()) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      ++num_asleep_;
      wake_.wait(lock, [this] { return HasWork(); });
      --num_asleep_;
    }
  }

  using Call = void (*)(const void*, int64_t);
  std::atomic<bool> is_busy_{false};
  // Number of the round, pieces of its work, and those that were taken.
  std::atomic<uint64_t> state_{0};
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> work_{nullptr};
  std::atomic<int64_t> done_{0};
  std::atomic<int> num_asleep_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// ``work`` of every piece, by all of XLA's number of threads if it is worth it.
template <typename Work>
void Share(ffi::ThreadPool& pool, int64_t pieces, bool worth_it, const Work& work) {
  const int64_t num_threads = worth_it && pieces > 1 ? pool.num_threads() : 1;
  if (num_threads > 1 && Helpers::Of(num_threads - 1).Run(pieces, work)) return;
  for (int64_t piece = 0; piece < pieces; ++piece) work(piece);
}

// Work below which waking another thread costs more than it saves: bytes of weights.
constexpr int64_t kBytesWorthSharing = 96 * 1024;

// Into how many pieces work on so many bytes is shared out: each takes longer than threads need to
// agree on who does it, and they are small enough that threads finish together.
int64_t NumPieces(const ffi::ThreadPool& pool, size_t bytes) {
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  return std::clamp<int64_t>(bytes / kBytesWorthSharing, threads, 4 * threads);
}

// How many of so many new tokens of a row count.
int64_t NumUsed(const ffi::Buffer<ffi::S32>& used, int64_t num_new) {
  return std::clamp<int64_t>(*used.typed_data(), 0, num_new);
}

// The rows that count, of inputs ``[..., new, width]``: the first ``used`` of ``new`` each.
std::vector<int64_t> UsedRows(ffi::Span<const int64_t> shape, const ffi::Buffer<ffi::S32>& used) {
  const int64_t rank = shape.size(), num_new = rank > 1 ? shape[rank - 2] : 1;
  const int64_t num_used = NumUsed(used, num_new);
  int64_t groups = 1;
  for (int64_t axis = 0; axis + 2 < rank; ++axis) groups *= shape[axis];
  std::vector<int64_t> rows;
  rows.reserve(groups * num_used);
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t i = 0; i < num_used; ++i) rows.push_back(group * num_new + i);
  }
  return rows;
}

// Zeros in the rows of an output that do not count.
void ClearUnused(ffi::Result<ffi::Buffer<ffi::F32>>& outputs, const std::vector<int64_t>& rows) {
  const int64_t width = outputs->dimensions().back();
  const int64_t all = outputs->element_count() / width;
  float* begin = outputs->typed_data();
  int64_t next = 0;
  for (int64_t row : rows) {
    std::fill(begin + next * width, begin + row * width, 0.0f);
    next = row + 1;
  }
  std::fill(begin + next * width, begin + all * width, 0.0f);
}

// outputs[row, column] = sum over k of inputs[row, k] * weights[k, column]
//
// Weights are in panels of kColumnBlock columns, one after the other: memory is read in its
// order. In bfloat16 they take half of it, and are widened in registers, which is exact.

constexpr int kColumnBlock = 64;
// Registers of a row of a panel.
constexpr int kBlockWidth = kColumnBlock / kLanes;
// Rows of a panel that stay in the nearest cache while groups of inputs pass over them; weights
// of 4 bits have a scale for each of these blocks of a column.
constexpr int kInnerBlock = 64;

// Elements of a row of a panel.
template <typename Weight>
constexpr int kRowLength = kColumnBlock;
template <>
constexpr int kRowLength<Nibbles> = kColumnBlock / 2;

// A register of a row of a panel, from a column on.
template <typename Weight>
inline Lanes LoadColumns(const Weight* row, int column) {
  return Load(row + column);
}

inline Lanes LoadColumns(const Nibbles* row, int column) {
  const bool is_upper = column >= kColumnBlock / 2;
  const Nibbles* from = row + (is_upper ? column - kColumnBlock / 2 : column);
#if defined(__AVX512F__)
  const IntLanes both =
      (IntLanes)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  const IntLanes both =
      (IntLanes)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  IntLanes both;
  for (int i = 0; i < kLanes; ++i) both[i] = from[i].both;
#endif
  return __builtin_convertvector(is_upper ? both >> 4 : (both << 28) >> 28, Lanes);
}

// How many registers of columns have room for a group's sums, the weights and a factor.
constexpr int PartWidth(int rows) {
  int width = kBlockWidth;
  // A single row's weights are used as they are loaded.
  while (width > 1 && rows * width + (rows > 1 ? width + 1 : 2) > kRegisters) width /= 2;
  return width;
}

constexpr int kCacheLine = 64;

// Inputs of products, [rows, inner], of which some rows count; in groups of rows.
class Inputs {
 public:
  static constexpr int64_t kMostInGroup = 6;

  Inputs(const float* inputs, const std::vector<int64_t>& rows, int64_t inner)
      : inputs_(inputs), rows_(rows), inner_(inner) {}

  int64_t inner() const { return inner_; }
  // Whole groups, and one of what is left: three rows take as long as six.
  int64_t groups() const { return (rows_.size() + kMostInGroup - 1) / kMostInGroup; }
  int64_t size(int64_t group) const {
    return std::min<int64_t>(kMostInGroup, rows_.size() - group * kMostInGroup);
  }
  const int64_t* rows(int64_t group) const { return rows_.data() + group * kMostInGroup; }
  const std::vector<int64_t>& rows() const { return rows_; }
  const float* row(int64_t row) const { return inputs_ + row * inner_; }

 private:
  const float* const inputs_;
  const std::vector<int64_t>& rows_;
  const int64_t inner_;
};

// Bytes ahead of a pass: enough that memory answers in time, measured.
constexpr int64_t kAhead = 8192;

// Prefetches of a pass, so that memory is never idle: two cache lines for each k, of a block that
// comes next. At the end of the weights it prefetches the same two again.
struct Ahead {
  const char* begin;
  int64_t stride;

  // The share of one of several passes over a block.
  Ahead Part(int part, int parts) const {
    const int lines = std::max<int>(stride / kCacheLine, 1), each = std::max(lines / parts, 1);
    return part * each < lines ? Ahead{begin + part * each * kCacheLine, stride}
                               : Ahead{begin, 0};
  }
};

// Some k of a panel, from the first of them on: what is added to the outputs, or put there by those
// from 0 on.
template <typename Weight>
struct Block {
  const Weight* weights;
  int64_t first_k, num_k;
  // Of its columns, by which their sums over these k are multiplied; none where there are none.
  const float* scales;
};

// A group of inputs and a block, kWidth registers of its columns.
template <typename Weight, int kRows, int kWidth>
inline void MultiplyPart(const Inputs& inputs, const int64_t* rows, const Block<Weight>& block,
                         int column, Ahead ahead, float* outputs, int64_t stride) {
  outputs += column;
  const float* factors[kRows];
  for (int r = 0; r < kRows; ++r) factors[r] = inputs.row(rows[r]) + block.first_k;
  Lanes sums[kRows][kWidth];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int u = 0; u < kWidth; ++u) {
      const bool is_new = block.first_k == 0 || block.scales;
      sums[r][u] = is_new ? Lanes{} : Load(outputs + rows[r] * stride + u * kLanes);
    }
  }
  const Weight* weights = block.weights;
  const int64_t num_k = block.num_k;
  for (int64_t k = 0; k < num_k; ++k) {
    __builtin_prefetch(ahead.begin, 0, 3);
    __builtin_prefetch(ahead.begin + kCacheLine, 0, 3);
    ahead.begin += ahead.stride;
    Lanes loaded[kWidth];
#pragma GCC unroll 8
    for (int u = 0; u < kWidth; ++u) {
      loaded[u] = LoadColumns(weights, column + u * kLanes);
      Keep(loaded[u]);
    }
    weights += kRowLength<Weight>;
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const Lanes factor = Fill(factors[r][k]);
#pragma GCC unroll 8
      for (int u = 0; u < kWidth; ++u) sums[r][u] = Fma(factor, loaded[u], sums[r][u]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int u = 0; u < kWidth; ++u) {
      float* to = outputs + rows[r] * stride + u * kLanes;
      if (block.scales) {
        const Lanes scale = Load(block.scales + column + u * kLanes);
        sums[r][u] = Fma(sums[r][u], scale, block.first_k == 0 ? Lanes{} : Load(to));
      }
      Store(to, sums[r][u]);
    }
  }
}

// All columns of a block, as many at a time as there are registers for their sums.
template <typename Weight, int kRows>
void MultiplyGroup(const Inputs& inputs, const int64_t* rows, const Block<Weight>& block,
                   Ahead ahead, float* outputs, int64_t stride) {
  constexpr int kPart = PartWidth(kRows), kParts = kBlockWidth / kPart;
#pragma GCC unroll 1
  for (int part = 0; part < kParts; ++part) {
    MultiplyPart<Weight, kRows, kPart>(inputs, rows, block, part * kPart * kLanes,
                                       ahead.Part(part, kParts), outputs, stride);
  }
}

// A block with a group of inputs.
template <typename Weight>
void MultiplyBlock(const Inputs& inputs, int64_t group, const Block<Weight>& block, Ahead ahead,
                   float* outputs, int64_t stride) {
  using Group = void (*)(const Inputs&, const int64_t*, const Block<Weight>&, Ahead, float*,
                         int64_t);
  constexpr Group kGroups[Inputs::kMostInGroup] = {
      MultiplyGroup<Weight, 1>, MultiplyGroup<Weight, 2>, MultiplyGroup<Weight, 3>,
      MultiplyGroup<Weight, 4>, MultiplyGroup<Weight, 5>, MultiplyGroup<Weight, 6>};
  kGroups[inputs.size(group) - 1](inputs, inputs.rows(group), block, ahead, outputs, stride);
}

// All inputs with a panel, whose blocks have scales or have none.
template <typename Weight>
void MultiplyPanel(const Inputs& inputs, const Weight* panel, const float* scales, float* outputs,
                   int64_t stride) {
  constexpr int64_t kRowSize = kRowLength<Weight> * sizeof(Weight);
  const int64_t inner = inputs.inner(), groups = inputs.groups();
  if (groups == 1 && PartWidth(inputs.size(0)) == kBlockWidth && !scales) {
    const Ahead ahead = {reinterpret_cast<const char*>(panel) + kAhead, kRowSize};
    MultiplyBlock<Weight>(inputs, 0, {panel, 0, inner, nullptr}, ahead, outputs, stride);
    return;
  }
  alignas(64) float room[kInnerBlock * kColumnBlock];
  for (int64_t k = 0; k < inner; k += kInnerBlock) {
    const int64_t num_k = std::min<int64_t>(kInnerBlock, inner - k);
    const Weight* weights = panel + k * kRowLength<Weight>;
    const char* next = reinterpret_cast<const char*>(weights) + std::max(num_k * kRowSize, kAhead);
    const float* block_scales = scales ? scales + k / kInnerBlock * kColumnBlock : nullptr;
    const bool widens = sizeof(Weight) < sizeof(float) && groups > 1;
    if (widens) {
      for (int64_t i = 0; i < num_k; ++i) {
        const Weight* row = weights + i * kRowLength<Weight>;
        for (int column = 0; column < kColumnBlock; column += kLanes) {
          Store(room + i * kColumnBlock + column, LoadColumns(row, column));
        }
      }
    }
    for (int64_t group = 0; group < groups; ++group) {
      const Ahead ahead = {next, group ? 0 : kRowSize};
      if (widens) {
        MultiplyBlock<float>(inputs, group, {room, k, num_k, block_scales}, ahead, outputs, stride);
      } else {
        MultiplyBlock<Weight>(inputs, group, {weights, k, num_k, block_scales}, ahead, outputs,
                              stride);
      }
    }
  }
}

// Scales of a panel of a matrix; -1 for a type that it cannot have.
int64_t ScalesOfPanel(ffi::DataType type, int64_t inner) {
  if (type == ffi::F32 || type == ffi::BF16) return 0;
  if (type == ffi::S8) return kColumnBlock;
  return type == ffi::U8 ? (inner + kInnerBlock - 1) / kInnerBlock * kColumnBlock : -1;
}

// A matrix as a call is given it.
struct Matrix {
  // Panels [panels, inner, kColumnBlock]; with 4 bits, half as many bytes.
  ffi::AnyBuffer panels;
  // Of int8 one for each column, of 4 bits one for each block of it.
  const float* scales;
  // Added to the outputs; null for none.
  const float* bias;
  int64_t columns;

  int64_t num_panels() const { return (columns + kColumnBlock - 1) / kColumnBlock; }
};

// A matrix and where the rows of its outputs go, on top of those of ``residual`` if there are any.
struct Product {
  const Matrix& matrix;
  float* outputs;
  const float* residual = nullptr;

  void Run(int64_t panel, const Inputs& inputs) const {
    const int64_t column = panel * kColumnBlock, columns = matrix.columns;
    const int64_t width = std::min<int64_t>(columns - column, kColumnBlock);
    if (width == kColumnBlock) {
      RunWhole(panel, inputs, outputs + column, columns);
    } else {
      // Of the last panel some columns are not the matrix's.
      std::vector<float> whole((inputs.rows().back() + 1) * kColumnBlock);
      RunWhole(panel, inputs, whole.data(), kColumnBlock);
      for (int64_t row : inputs.rows()) {
        std::copy_n(whole.data() + row * kColumnBlock, width, outputs + row * columns + column);
      }
    }
    for (int64_t row : inputs.rows()) {
      const int64_t at = row * columns + column;
      if (matrix.bias) Add(outputs + at, matrix.bias + column, width);
      if (residual) Add(outputs + at, residual + at, width);
    }
  }

 private:
  static void Add(float* to, const float* other, int64_t width) {
    for (int64_t i = 0; i < width; ++i) to[i] += other[i];
  }

  void RunWhole(int64_t panel, const Inputs& inputs, float* to, int64_t stride) const {
    const ffi::DataType type = matrix.panels.element_type();
    const float* scales = matrix.scales + panel * ScalesOfPanel(type, inputs.inner());
    if (type == ffi::BF16) {
      MultiplyPanel(inputs, Panel<uint16_t>(panel, inputs), nullptr, to, stride);
    } else if (type == ffi::S8) {
      MultiplyPanel(inputs, Panel<int8_t>(panel, inputs), nullptr, to, stride);
      for (int64_t row : inputs.rows()) {
        for (int i = 0; i < kColumnBlock; ++i) to[row * stride + i] *= scales[i];
      }
    } else if (type == ffi::U8) {
      MultiplyPanel(inputs, Panel<Nibbles>(panel, inputs), scales, to, stride);
    } else {
      MultiplyPanel(inputs, Panel<float>(panel, inputs), nullptr, to, stride);
    }
  }

  template <typename Weight>
  const Weight* Panel(int64_t panel, const Inputs& inputs) const {
    return static_cast<const Weight*>(matrix.panels.untyped_data()) +
           panel * inputs.inner() * kRowLength<Weight>;
  }
};

// Several products of the same inputs. The threads take panels of all of them: they are woken
// once, and short products do not wait for one another.
void MultiplyAll(ffi::ThreadPool& pool, const Inputs& inputs, const std::vector<Product>& products) {
  if (inputs.rows().empty()) return;
  int64_t panels = 0;
  size_t bytes = 0;
  for (const Product& product : products) {
    panels += product.matrix.num_panels();
    bytes += product.matrix.panels.size_bytes();
  }
  const int64_t pieces = std::min(panels, NumPieces(pool, bytes));
  Share(pool, pieces, bytes >= kBytesWorthSharing, [&](int64_t piece) {
    int64_t first = 0;
    const int64_t begin = panels * piece / pieces, end = panels * (piece + 1) / pieces;
    for (const Product& product : products) {
      const int64_t num = product.matrix.num_panels();
      for (int64_t panel = std::max(begin, first); panel < std::min(end, first + num); ++panel) {
        product.Run(panel - first, inputs);
      }
      first += num;
    }
  });
}

// Reads matrices from the arguments of a call: panels of each, scales of each, biases of each.
class Matrices {
 public:
  Matrices(ffi::RemainingArgs arguments) : arguments_(arguments), num_(arguments.size() / 3) {}

  // The next matrix, [inner, columns].
  ffi::Error Read(int64_t inner, int64_t columns, std::vector<Matrix>& matrices) const {
    const size_t i = matrices.size();
    if (i >= num_) return ffi::Error::InvalidArgument("a product lacks its matrix");
    auto panels = arguments_.get<ffi::AnyBuffer>(i);
    auto scales = arguments_.get<ffi::Buffer<ffi::F32>>(num_ + i);
    auto bias = arguments_.get<ffi::Buffer<ffi::F32>>(2 * num_ + i);
    if (panels.has_error()) return panels.error();
    if (scales.has_error()) return scales.error();
    if (bias.has_error()) return bias.error();
    const ffi::DataType type = panels->element_type();
    const bool has_bias = bias->element_count() > 0;
    const Matrix matrix = {*panels, scales->typed_data(), has_bias ? bias->typed_data() : nullptr,
                           columns};
    const int64_t row_length = type == ffi::U8 ? kRowLength<Nibbles> : kColumnBlock;
    const int64_t num_panels = matrix.num_panels(), num_scales = ScalesOfPanel(type, inner);
    if (num_scales < 0 || Differ(scales->element_count(), num_panels * num_scales) ||
        Differ(panels->element_count(), num_panels * inner * row_length) ||
        (has_bias && Differ(bias->element_count(), columns))) {
      return ffi::Error::InvalidArgument("panels of a product do not fit");
    }
    matrices.push_back(matrix);
    return ffi::Error::Success();
  }

 private:
  static bool Differ(size_t found, int64_t wanted) { return found != static_cast<size_t>(wanted); }

  const ffi::RemainingArgs arguments_;
  const size_t num_;
};

// outputs = inputs / sqrt(mean(inputs ** 2) + epsilon) * scale + bias, of a row; ``centred``, of
// the inputs less their mean. T5's norm has neither mean nor bias, GPT-2's has both.
struct Norm {
  // No scale: there is no norm. No bias: nothing is added.
  const ffi::Buffer<ffi::F32>&scale, &bias;
  float epsilon;
  bool centred;

  // All rows that count, into ``to``; or the inputs as they are.
  const float* Apply(const float* inputs, const std::vector<int64_t>& rows,
                     std::unique_ptr<float[]>& to) const {
    const int64_t width = scale.element_count();
    if (width == 0 || rows.empty()) return inputs;
    to.reset(new float[(rows.back() + 1) * width]);
    for (int64_t row : rows) Row(inputs + row * width, width, to.get() + row * width);
    return to.get();
  }

  void Row(const float* from, int64_t width, float* to) const {
    const int64_t whole = width / kLanes * kLanes;
    float mean = 0.0f;
    if (centred) {
      Lanes sums = {};
      for (int64_t i = 0; i < whole; i += kLanes) sums += Load(from + i);
      mean = Sum(sums);
      for (int64_t i = whole; i < width; ++i) mean += from[i];
      mean /= width;
    }
    Lanes squares = {};
    for (int64_t i = 0; i < whole; i += kLanes) {
      const Lanes centred_lanes = Load(from + i) - mean;
      squares = Fma(centred_lanes, centred_lanes, squares);
    }
    float square = Sum(squares);
    for (int64_t i = whole; i < width; ++i) {
      square = std::fma(from[i] - mean, from[i] - mean, square);
    }
    const float inverse = 1.0f / std::sqrt(square / width + epsilon);
    const float* factors = scale.typed_data();
    for (int64_t i = 0; i < width; ++i) to[i] = (from[i] - mean) * inverse * factors[i];
    if (bias.element_count() > 0) {
      for (int64_t i = 0; i < width; ++i) to[i] += bias.typed_data()[i];
    }
  }
};

// The products of a layer's inputs, normed first; ``residual``, of a single product, is added.
ffi::Error Multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> inputs,
                    ffi::Buffer<ffi::S32> used, ffi::Buffer<ffi::F32> norm_scale,
                    ffi::Buffer<ffi::F32> norm_bias, ffi::Buffer<ffi::F32> residual,
                    ffi::RemainingArgs arguments, ffi::RemainingRets outputs, float epsilon,
                    bool centred) {
  const int64_t inner = inputs.dimensions().back();
  const size_t all_rows = inputs.element_count() / inner;
  const std::vector<int64_t> rows = UsedRows(inputs.dimensions(), used);
  const Matrices given(arguments);
  std::vector<Matrix> matrices;
  std::vector<Product> products;
  matrices.reserve(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    auto output = outputs.get<ffi::Buffer<ffi::F32>>(i);
    if (output.has_error()) return output.error();
    const int64_t columns = (*output)->dimensions().back();
    const ffi::Error error = given.Read(inner, columns, matrices);
    if (error.failure()) return error;
    const size_t num_added = residual.element_count();
    if ((*output)->element_count() != all_rows * columns ||
        (num_added > 0 && (num_added != all_rows * columns || outputs.size() > 1))) {
      return ffi::Error::InvalidArgument("outputs of a product do not fit");
    }
    ClearUnused(*output, rows);
    const float* added = num_added > 0 ? residual.typed_data() : nullptr;
    products.push_back({matrices.back(), (*output)->typed_data(), added});
  }
  std::unique_ptr<float[]> room;
  const Norm norm = {norm_scale, norm_bias, epsilon, centred};
  const float* normed = norm.Apply(inputs.typed_data(), rows, room);
  MultiplyAll(pool, Inputs(normed, rows, inner), products);
  return ffi::Error::Success();
}

// outputs[row, n] = sum over k of inputs[row, k] * table[n, k]: a table of embeddings as the
// output layer.

template <typename Weight, int kRows, int kTokens>
inline void DotBlock(const float* inputs, int64_t inner, const int64_t* rows, const Weight* table,
                     int64_t vocab, float* outputs) {
  Lanes sums[kRows][kTokens] = {};
  int64_t k = 0;
  for (; k + kLanes <= inner; k += kLanes) {
    Lanes loaded[kTokens];
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) loaded[t] = Load(table + t * inner + k);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const Lanes factor = Load(inputs + rows[r] * inner + k);
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) sums[r][t] = Fma(factor, loaded[t], sums[r][t]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kTokens; ++t) {
      float sum = Sum(sums[r][t]);
      for (int64_t rest = k; rest < inner; ++rest) {
        sum = std::fma(inputs[rows[r] * inner + rest], Widened(table[t * inner + rest]), sum);
      }
      outputs[rows[r] * vocab + t] = sum;
    }
  }
}

// Tokens whose rows of the table stay in a near cache between groups of rows.
constexpr int64_t kTokenBlock = 16;

// All rows of some tokens of the table, from ``begin`` to ``end``.
template <typename Weight>
void DotTokens(const float* inputs, const std::vector<int64_t>& rows, int64_t inner,
               const Weight* table, int64_t begin, int64_t end, int64_t vocab, float* outputs) {
  using Block = void (*)(const float*, int64_t, const int64_t*, const Weight*, int64_t, float*);
  constexpr Block kBlocks[] = {DotBlock<Weight, 1, 4>, DotBlock<Weight, 2, 4>, DotBlock<Weight, 3, 4>,
                               DotBlock<Weight, 4, 4>, DotBlock<Weight, 5, 4>, DotBlock<Weight, 6, 4>};
  constexpr Block kTails[] = {DotBlock<Weight, 1, 1>, DotBlock<Weight, 2, 1>, DotBlock<Weight, 3, 1>,
                              DotBlock<Weight, 4, 1>, DotBlock<Weight, 5, 1>, DotBlock<Weight, 6, 1>};
  // Four tokens of each.
  const int64_t num_rows = rows.size(), most = kRegisters == 32 ? 6 : 3;
  for (int64_t row = 0; row < num_rows; row += most) {
    const int64_t which = std::min(most, num_rows - row) - 1;
    int64_t token = begin;
    for (; token + 4 <= end; token += 4) {
      kBlocks[which](inputs, inner, rows.data() + row, table + token * inner, vocab,
                     outputs + token);
    }
    for (; token < end; ++token) {
      kTails[which](inputs, inner, rows.data() + row, table + token * inner, vocab,
                    outputs + token);
    }
  }
}

ffi::Error Dot(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> inputs, ffi::Buffer<ffi::S32> used,
               ffi::AnyBuffer table, ffi::ResultBuffer<ffi::F32> outputs) {
  const bool is_narrow = table.element_type() == ffi::U16;
  const int64_t inner = inputs.dimensions().back();
  const int64_t all_rows = inputs.element_count() / inner;
  const int64_t vocab = table.dimensions().front();
  if (!(is_narrow || table.element_type() == ffi::F32) || table.dimensions().back() != inner ||
      outputs->element_count() != static_cast<size_t>(all_rows * vocab)) {
    return ffi::Error::InvalidArgument("shapes of a table and its inputs do not fit");
  }
  const std::vector<int64_t> rows = UsedRows(inputs.dimensions(), used);
  ClearUnused(outputs, rows);
  const int64_t blocks = (vocab + kTokenBlock - 1) / kTokenBlock;
  const int64_t pieces = std::min(blocks, NumPieces(pool, table.size_bytes()));
  Share(pool, pieces, table.size_bytes() >= kBytesWorthSharing, [&](int64_t piece) {
    for (int64_t block = blocks * piece / pieces; block < blocks * (piece + 1) / pieces; ++block) {
      const int64_t begin = block * kTokenBlock, end = std::min(vocab, begin + kTokenBlock);
      if (is_narrow) {
        DotTokens(inputs.typed_data(), rows, inner,
                  static_cast<const uint16_t*>(table.untyped_data()), begin, end, vocab,
                  outputs->typed_data());
      } else {
        DotTokens(inputs.typed_data(), rows, inner,
                  static_cast<const float*>(table.untyped_data()), begin, end, vocab,
                  outputs->typed_data());
      }
    }
  });
  return ffi::Error::Success();
}

ffi::Error Normalize(ffi::Buffer<ffi::F32> inputs, ffi::Buffer<ffi::S32> used,
                     ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::F32> bias,
                     ffi::ResultBuffer<ffi::F32> outputs, float epsilon, bool centred) {
  const int64_t width = scale.element_count();
  const std::vector<int64_t> rows = UsedRows(inputs.dimensions(), used);
  ClearUnused(outputs, rows);
  const Norm norm = {scale, bias, epsilon, centred};
  for (int64_t row : rows) {
    norm.Row(inputs.typed_data() + row * width, width, outputs->typed_data() + row * width);
  }
  return ffi::Error::Success();
}

// exp(x) for x <= 0, to about 1e-7: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
inline Lanes Exp(Lanes x) {
  const Lanes lowest = Lanes{} - 87.0f;
  const IntLanes too_low = x < lowest;
  x = too_low ? lowest : x;
  // Adding 1.5 * 2^23 rounds to the nearest whole number.
  const float magic = 12582912.0f;
  const Lanes shifted = x * 1.44269504088896341f + magic;
  const Lanes n = shifted - magic;
  Lanes r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  IntLanes exponent = __builtin_convertvector(n, IntLanes);
  exponent = (exponent + 127) << 23;
  Lanes scale;
  std::memcpy(&scale, &exponent, sizeof(scale));
  return too_low ? Lanes{} : p * scale;
}

// The largest value of each row, where it is first, and the logarithm of sum exp(values).
//
// In one pass for the exponentials: the running sum is scaled anew where a block of the row
// brings a larger value. Pieces are rows, and blocks of long rows.
constexpr int64_t kSummaryBlock = 2048;

constexpr float kLowest = -std::numeric_limits<float>::infinity();

struct BlockSummary {
  float largest;
  int64_t where;
  float sum;  // of exp(value - largest)
};

BlockSummary SummarizeBlock(const float* values, int64_t begin, int64_t end, bool with_sum) {
  int64_t i = begin;
  Lanes tops = Lanes{} + kLowest;
  for (; i + kLanes <= end; i += kLanes) {
    const Lanes lanes = Load(values + i);
    tops = lanes > tops ? lanes : tops;
  }
  float largest = kLowest;
  for (int lane = 0; lane < kLanes; ++lane) largest = std::max(largest, tops[lane]);
  for (; i < end; ++i) largest = std::max(largest, values[i]);
  int64_t where = begin;
  while (where < end && values[where] != largest) ++where;
  BlockSummary summary{largest, where, 0.0f};
  if (!with_sum || largest == kLowest) return summary;
  Lanes sums = {};
  for (i = begin; i + kLanes <= end; i += kLanes) sums += Exp(Load(values + i) - largest);
  if (i < end) {
    float rest[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) rest[lane] = i + lane < end ? values[i + lane] : kLowest;
    sums += Exp(Load(rest) - largest);
  }
  summary.sum = Sum(sums);
  return summary;
}

ffi::Error Summarize(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> values,
                     ffi::ResultBuffer<ffi::S32> best, ffi::ResultBuffer<ffi::F32> log_sums,
                     bool with_sums) {
  const int64_t width = values.dimensions().back();
  const int64_t rows = values.element_count() / width;
  const int64_t blocks = (width + kSummaryBlock - 1) / kSummaryBlock;
  std::vector<BlockSummary> found(rows * blocks);
  Share(pool, rows * blocks, rows * width >= 16 * kSummaryBlock, [&](int64_t piece) {
    const int64_t row = piece / blocks, begin = piece % blocks * kSummaryBlock;
    found[piece] = SummarizeBlock(values.typed_data() + row * width, begin,
                                  std::min(width, begin + kSummaryBlock), with_sums);
  });
  for (int64_t row = 0; row < rows; ++row) {
    const BlockSummary* of_row = found.data() + row * blocks;
    BlockSummary top = of_row[0];
    for (int64_t block = 1; block < blocks; ++block) {
      if (of_row[block].largest > top.largest) top = of_row[block];
    }
    best->typed_data()[row] = static_cast<int32_t>(std::min(top.where, width - 1));
    float sum = 0.0f;
    for (int64_t block = 0; block < blocks; ++block) {
      sum += of_row[block].sum * std::exp(of_row[block].largest - top.largest);
    }
    log_sums->typed_data()[row] = top.largest + std::log(sum);
  }
  return ffi::Error::Success();
}

// Passes over a row of probabilities, below which another thread is not woken: numbers.
constexpr int64_t kNumbersWorthSharing = 4 * kSummaryBlock;

// Calls work(lanes, i) for each register of a row; values beyond its end are ``filler``.
template <typename Work>
inline void ForLanes(const float* values, int64_t width, float filler, const Work& work) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) work(Load(values + i), i);
  if (i == width) return;
  float rest[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) rest[lane] = i + lane < width ? values[i + lane] : filler;
  work(Load(rest), i);
}

// Stores a register, or as much of it as the row has room for.
inline void StoreWithin(float* values, int64_t width, int64_t i, Lanes lanes) {
  if (i + kLanes <= width) {
    Store(values + i, lanes);
  } else {
    for (int lane = 0; i + lane < width; ++lane) values[i + lane] = lanes[lane];
  }
}

// What a threshold is looked for in: blocks of a row, passed over where they hold nothing
// that could be it.
constexpr int64_t kCandidateBlock = 4 * kLanes;

std::vector<float> BlockMaxima(const float* values, int64_t width) {
  std::vector<float> maxima((width + kCandidateBlock - 1) / kCandidateBlock, kLowest);
  for (size_t block = 0; block < maxima.size(); ++block) {
    const int64_t begin = block * kCandidateBlock;
    Lanes tops = Lanes{} + kLowest;
    ForLanes(values + begin, std::min(kCandidateBlock, width - begin), kLowest,
             [&](Lanes lanes, int64_t) { tops = lanes > tops ? lanes : tops; });
    for (int lane = 0; lane < kLanes; ++lane) maxima[block] = std::max(maxima[block], tops[lane]);
  }
  return maxima;
}

// All values of at least ``bound``.
std::vector<float> AtLeast(const float* values, int64_t width, const std::vector<float>& maxima,
                           float bound) {
  std::vector<float> found(width + 1);
  int64_t count = 0;
  for (size_t block = 0; block < maxima.size(); ++block) {
    if (!(maxima[block] >= bound)) continue;
    const int64_t begin = block * kCandidateBlock;
    const int64_t end = std::min(width, begin + kCandidateBlock);
    // Without a branch, which could not be foretold.
    for (int64_t i = begin; i < end; ++i) {
      found[count] = values[i];
      count += values[i] >= bound;
    }
  }
  found.resize(count);
  return found;
}

float Largest(std::vector<float> values, int64_t rank) {
  std::nth_element(values.begin(), values.begin() + rank - 1, values.end(), std::greater<float>());
  return values[rank - 1];
}

// The least of the ``top_k`` largest values.
float SmallestKept(const float* values, int64_t width, int64_t top_k) {
  const std::vector<float> maxima = BlockMaxima(values, width);
  // So many blocks have a value that is no smaller: neither is the one looked for.
  const bool few = top_k <= static_cast<int64_t>(maxima.size());
  const float bound = few ? Largest(maxima, top_k) : kLowest;
  std::vector<float> candidates = AtLeast(values, width, maxima, bound);
  // Numbers that are none are no candidates.
  if (static_cast<int64_t>(candidates.size()) < top_k) return kLowest;
  return Largest(std::move(candidates), top_k);
}

// Keeps the likeliest tokens whose mass reaches ``top_p``, and makes them sum to 1.
void KeepNucleus(float* probs, int64_t width, float largest, float top_p) {
  // Tokens below this have less mass, all together, than the nucleus leaves out.
  const float bound = std::max(0.0f, 0.5f * (1.0f - top_p) / width);
  const std::vector<float> candidates = AtLeast(probs, width, BlockMaxima(probs, width), bound);
  // By bisection over the bits of the threshold, which order as the numbers do that are not
  // negative: the lower bound always keeps enough, the upper one never does.
  auto number = [](int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  };
  int32_t low, high;
  std::memcpy(&low, &bound, sizeof(low));
  std::memcpy(&high, &largest, sizeof(high));
  for (++high; high - low > 1;) {
    const int32_t middle = low + (high - low) / 2;
    const float threshold = number(middle);
    Lanes mass = {};
    ForLanes(candidates.data(), candidates.size(), 0.0f,
             [&](Lanes lanes, int64_t) { mass += lanes >= threshold ? lanes : Lanes{}; });
    (Sum(mass) >= top_p ? low : high) = middle;
  }
  const float least = number(low);
  Lanes kept = {};
  ForLanes(candidates.data(), candidates.size(), 0.0f,
           [&](Lanes lanes, int64_t) { kept += lanes >= least ? lanes : Lanes{}; });
  const float total = Sum(kept);
  ForLanes(probs, width, 0.0f, [&](Lanes lanes, int64_t i) {
    StoreWithin(probs, width, i, (lanes >= least ? lanes : Lanes{}) / total);
  });
}

// Of one row of logits the distribution that is sampled: argmax up to ``least_temperature``,
// or temperature, then top-k or top-p (0 for none).
void StandardizeRow(const float* logits, int64_t width, float temperature, int64_t top_k,
                    float top_p, float least_temperature, float* probs) {
  if (!(temperature > least_temperature)) {
    const int64_t best = SummarizeBlock(logits, 0, width, false).where;
    std::fill(probs, probs + width, 0.0f);
    probs[std::min(best, width - 1)] = 1.0f;
    return;
  }
  Lanes tops = Lanes{} + kLowest;
  ForLanes(logits, width, kLowest, [&](Lanes lanes, int64_t i) {
    const Lanes warped = lanes / temperature;
    tops = warped > tops ? warped : tops;
    StoreWithin(probs, width, i, warped);
  });
  float largest = kLowest;
  for (int lane = 0; lane < kLanes; ++lane) largest = std::max(largest, tops[lane]);
  const float least = 0 < top_k && top_k < width ? SmallestKept(probs, width, top_k) : kLowest;
  Lanes sums = {};
  ForLanes(probs, width, kLowest, [&](Lanes lanes, int64_t i) {
    const Lanes weights = lanes >= least ? Exp(lanes - largest) : Lanes{};
    sums += weights;
    StoreWithin(probs, width, i, weights);
  });
  const float inverse = 1.0f / Sum(sums);
  ForLanes(probs, width, 0.0f, [&](Lanes lanes, int64_t i) {
    StoreWithin(probs, width, i, lanes * inverse);
  });
  // exp(0) is 1: the likeliest token's probability.
  if (top_p > 0) KeepNucleus(probs, width, inverse, top_p);
}

ffi::Error Standardize(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits,
                       ffi::Buffer<ffi::F32> temperatures, ffi::ResultBuffer<ffi::F32> probs,
                       int64_t top_k, float top_p, float least_temperature) {
  const int64_t width = logits.dimensions().back();
  const int64_t rows = logits.element_count() / width;
  if (static_cast<int64_t>(temperatures.element_count()) != rows) {
    return ffi::Error::InvalidArgument("a temperature is needed for each row");
  }
  Share(pool, rows, rows * width >= kNumbersWorthSharing, [&](int64_t row) {
    StandardizeRow(logits.typed_data() + row * width, width, temperatures.typed_data()[row],
                   top_k, top_p, least_temperature, probs->typed_data() + row * width);
  });
  return ffi::Error::Success();
}

// How target and draft compare, for rows of each: sum min(p, q), and sum max(f p - q, 0) with
// a factor f for each row of the target's. Where the target has a row more than the draft, the
// draft has nothing there.
ffi::Error Compare(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> target, ffi::Buffer<ffi::F32> draft,
                   ffi::Buffer<ffi::F32> factors, ffi::ResultBuffer<ffi::F32> overlaps,
                   ffi::ResultBuffer<ffi::F32> excesses) {
  auto shape = target.dimensions();
  const int64_t width = shape.back(), of_target = shape[shape.size() - 2];
  const int64_t of_draft = draft.dimensions()[shape.size() - 2];
  const int64_t rows = target.element_count() / width;
  Share(pool, rows, rows * width >= kNumbersWorthSharing, [&](int64_t row) {
    const float* p = target.typed_data() + row * width;
    const int64_t place = row % of_target, in_draft = row / of_target * of_draft + place;
    const float factor = factors.typed_data()[row];
    Lanes overlap = {}, excess = {};
    if (place < of_draft) {
      const float* q = draft.typed_data() + in_draft * width;
      int64_t i = 0;
      for (; i + kLanes <= width; i += kLanes) {
        const Lanes ours = Load(p + i), theirs = Load(q + i), more = factor * ours - theirs;
        overlap += ours < theirs ? ours : theirs;
        excess += more > 0.0f ? more : Lanes{};
      }
      for (; i < width; ++i) {
        overlap[0] += std::min(p[i], q[i]);
        excess[0] += std::max(factor * p[i] - q[i], 0.0f);
      }
      overlaps->typed_data()[in_draft] = Sum(overlap);
    } else {
      ForLanes(p, width, 0.0f, [&](Lanes lanes, int64_t) { excess += factor * lanes; });
    }
    excesses->typed_data()[row] = Sum(excess);
  });
  return ffi::Error::Success();
}

// The first index whose cumulative mass exceeds ``uniform`` of the total, and has a mass of
// its own; the last one with any where rounding leaves none.
int64_t Invert(float uniform, const float* masses, int64_t count) {
  float total = 0.0f;
  for (int64_t i = 0; i < count; ++i) total += masses[i];
  const float wanted = uniform * total;
  float cumulative = 0.0f;
  int64_t last = 0;
  for (int64_t i = 0; i < count; ++i) {
    cumulative += masses[i];
    if (masses[i] > 0) {
      last = i;
      if (cumulative > wanted) return i;
    }
  }
  return last;
}

// A token of each row: a block of about sqrt(width) tokens, then a token in it. With a draft
// one of max(target - draft, 0), or of the target where nothing is left.
void SampleRow(const float* target, const float* draft, int64_t width, const float* uniforms,
               int32_t* token) {
  const int64_t in_block = std::max<int64_t>(1, std::sqrt(static_cast<double>(width)));
  const int64_t blocks = (width + in_block - 1) / in_block;
  std::vector<float> masses(blocks), within(in_block);
  auto fill = [&](const float* less) {
    bool any = false;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = block * in_block, size = std::min(in_block, width - begin);
      Lanes sums = {};
      int64_t i = 0;
      for (; i + kLanes <= size; i += kLanes) {
        Lanes lanes = Load(target + begin + i);
        if (less) {
          lanes -= Load(less + begin + i);
          lanes = lanes > 0.0f ? lanes : Lanes{};
        }
        sums += lanes;
      }
      float sum = Sum(sums);
      for (; i < size; ++i) {
        sum += less ? std::max(target[begin + i] - less[begin + i], 0.0f) : target[begin + i];
      }
      masses[block] = sum;
      any |= sum > 0;
    }
    return any;
  };
  if (!fill(draft) && draft) {
    draft = nullptr;
    fill(draft);
  }
  const int64_t begin = Invert(uniforms[0], masses.data(), blocks) * in_block;
  const int64_t size = std::min(in_block, width - begin);
  for (int64_t i = 0; i < size; ++i) {
    within[i] = draft ? std::max(target[begin + i] - draft[begin + i], 0.0f) : target[begin + i];
  }
  *token = static_cast<int32_t>(begin + Invert(uniforms[1], within.data(), size));
}

ffi::Error SampleRows(ffi::ThreadPool& pool, const ffi::Buffer<ffi::F32>& target,
                      const float* draft, const ffi::Buffer<ffi::F32>& uniforms,
                      ffi::ResultBuffer<ffi::S32>& tokens) {
  const int64_t width = target.dimensions().back();
  const int64_t rows = target.element_count() / width;
  if (static_cast<int64_t>(uniforms.element_count()) != 2 * rows) {
    return ffi::Error::InvalidArgument("two uniform numbers are needed for each row");
  }
  Share(pool, rows, rows * width >= kNumbersWorthSharing, [&](int64_t row) {
    SampleRow(target.typed_data() + row * width, draft ? draft + row * width : nullptr, width,
              uniforms.typed_data() + 2 * row, tokens->typed_data() + row);
  });
  return ffi::Error::Success();
}

ffi::Error Sample(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> probs,
                  ffi::Buffer<ffi::F32> uniforms, ffi::ResultBuffer<ffi::S32> tokens) {
  return SampleRows(pool, probs, nullptr, uniforms, tokens);
}

ffi::Error SampleResidual(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> target,
                          ffi::Buffer<ffi::F32> draft, ffi::Buffer<ffi::F32> uniforms,
                          ffi::ResultBuffer<ffi::S32> tokens) {
  if (target.element_count() != draft.element_count()) {
    return ffi::Error::InvalidArgument("target and draft need rows of one shape");
  }
  return SampleRows(pool, target, draft.typed_data(), uniforms, tokens);
}

// Threefry-2x32 of 20 rounds (Salmon et al. 2011): keys [rows, 2] and counts [rows], which are the
// second word of what is hashed.
ffi::Error Threefry(ffi::Buffer<ffi::U32> keys, ffi::Buffer<ffi::U32> counts,
                    ffi::ResultBuffer<ffi::U32> outputs) {
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  for (size_t row = 0; row < counts.element_count(); ++row) {
    const uint32_t* given = keys.typed_data() + 2 * row;
    const uint32_t key[3] = {given[0], given[1], given[0] ^ given[1] ^ 0x1BD11BDA};
    uint32_t first = key[0], second = counts.typed_data()[row] + key[1];
    for (uint32_t i = 0; i < 5; ++i) {
      for (int rotation : kRotations[i % 2]) {
        first += second;
        second = first ^ (second << rotation | second >> (32 - rotation));
      }
      first += key[(i + 1) % 3];
      second += key[(i + 2) % 3] + i + 1;
    }
    outputs->typed_data()[2 * row] = first;
    outputs->typed_data()[2 * row + 1] = second;
  }
  return ffi::Error::Success();
}

// out[t] = sum over d of queries[d] * keys[t][d] for kKeys keys; each by the same additions.
template <int kKeys>
inline void KeyProducts(const float* query, const float* const* keys, int64_t head_dim,
                        float* out) {
  Lanes sums[kKeys] = {};
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) {
    const Lanes factor = Load(query + d);
#pragma GCC unroll 4
    for (int t = 0; t < kKeys; ++t) sums[t] = Fma(factor, Load(keys[t] + d), sums[t]);
  }
#pragma GCC unroll 4
  for (int t = 0; t < kKeys; ++t) {
    float sum = Sum(sums[t]);
    for (int64_t rest = d; rest < head_dim; ++rest) {
      sum = std::fma(query[rest], keys[t][rest], sum);
    }
    out[t] = sum;
  }
}

// kWidth registers of the context, whose sums do not wait for one another.
template <int kWidth, typename Place>
inline void WeighValues(const float* weights, const float* values, const Place& place,
                        int64_t length, float factor, float* context) {
  Lanes sums[kWidth] = {};
  for (int64_t j = 0; j < length; ++j) {
    const float* value = values + place(j);
#pragma GCC unroll 4
    for (int u = 0; u < kWidth; ++u) {
      sums[u] = Fma(weights[j], Load(value + u * kLanes), sums[u]);
    }
  }
#pragma GCC unroll 4
  for (int u = 0; u < kWidth; ++u) Store(context + u * kLanes, sums[u] * factor);
}

// One head of one query: softmax(scale q K^T + bias) V over ``length`` tokens, whose keys and
// values are at ``place(j)``, and which are added up in the order of j. ``bias(j)`` comes on
// top of a score. ``scores`` has room for ``length``, rounded up to whole registers.
template <typename Place, typename Bias>
void AttendOne(const float* query, const float* keys, const float* values, const Place& place,
               const Bias& bias, int64_t length, int64_t head_dim, float scale, float* scores,
               float* context) {
  int64_t key = 0;
  for (; key + 4 <= length; key += 4) {
    const float* four[] = {keys + place(key), keys + place(key + 1), keys + place(key + 2),
                           keys + place(key + 3)};
    KeyProducts<4>(query, four, head_dim, scores + key);
  }
  for (; key < length; ++key) {
    const float* one = keys + place(key);
    KeyProducts<1>(query, &one, head_dim, scores + key);
  }
  for (int64_t j = 0; j < length; ++j) scores[j] *= scale;
  for (int64_t j = 0; j < length; ++j) scores[j] += bias(j);
  const int64_t padded = (length + kLanes - 1) / kLanes * kLanes;
  for (int64_t j = length; j < padded; ++j) scores[j] = kLowest;
  Lanes tops = Lanes{} + kLowest;
  for (int64_t j = 0; j < padded; j += kLanes) {
    const Lanes lanes = Load(scores + j);
    tops = lanes > tops ? lanes : tops;
  }
  float largest = kLowest;
  for (int lane = 0; lane < kLanes; ++lane) largest = std::max(largest, tops[lane]);
  Lanes totals = {};
  for (int64_t j = 0; j < padded; j += kLanes) {
    const Lanes weights = Exp(Load(scores + j) - largest);
    Store(scores + j, weights);
    totals += weights;
  }
  const float inverse = 1.0f / Sum(totals);
  int64_t d = 0;
  for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) {
    WeighValues<4>(scores, values + d, place, length, inverse, context + d);
  }
  for (; d + kLanes <= head_dim; d += kLanes) {
    WeighValues<1>(scores, values + d, place, length, inverse, context + d);
  }
  for (; d < head_dim; ++d) {
    float sum = 0.0f;
    for (int64_t j = 0; j < length; ++j) sum = std::fma(scores[j], values[place(j) + d], sum);
    context[d] = sum * inverse;
  }
}

// Added where attention is not allowed: its exponential is zero, unless nothing is allowed.
constexpr float kMasked = -1e10f;

// Multiplications of attention below which another thread is not woken.
constexpr int64_t kProductsWorthSharing = 10 * 1000;

// Attention of a layer, from its states [batch, new, embed] on: normed, they are multiplied by
// matrices of queries, or of queries, keys and values; and the heads' contexts by one more, whose
// products are added to the states. Keys and values are [batch or inputs, heads, length,
// head_dim].
class Attention {
 public:
  Attention(ffi::ThreadPool& pool, const ffi::Buffer<ffi::F32>& states,
            const ffi::Buffer<ffi::S32>& used, int64_t heads, int64_t length, int64_t head_dim)
      : batch(states.dimensions()[0]), num_new(states.dimensions()[1]),
        num_used(NumUsed(used, num_new)), heads(heads), length(length), head_dim(head_dim), pool_(pool), states_(states),
        rows_(UsedRows(states.dimensions(), used)) {}
  Attention(ffi::ThreadPool& pool, const ffi::Buffer<ffi::F32>& states,
            const ffi::Buffer<ffi::S32>& used, const ffi::Buffer<ffi::F32>& cached)
      : Attention(pool, states, used, cached.dimensions()[1], cached.dimensions()[2],
                  cached.dimensions()[3]) {}

  const int64_t batch, num_new, num_used, heads, length, head_dim;

  // Reads so many matrices and multiplies by all but the last.
  ffi::Error Project(size_t num, const ffi::RemainingArgs& arguments, const Norm& norm) {
    const int64_t embed = states_.dimensions()[2], joined = heads * head_dim;
    const Matrices given(arguments);
    matrices_.reserve(num);
    while (matrices_.size() + 1 < num) {
      const ffi::Error error = given.Read(embed, joined, matrices_);
      if (error.failure()) return error;
    }
    const ffi::Error error = given.Read(joined, embed, matrices_);
    if (error.failure()) return error;
    std::vector<Product> products;
    for (size_t i = 0; i + 1 < matrices_.size(); ++i) {
      projected_.push_back(Room());
      products.push_back({matrices_[i], projected_.back().get()});
    }
    std::unique_ptr<float[]> room;
    const float* normed = norm.Apply(states_.typed_data(), rows_, room);
    MultiplyAll(pool_, Inputs(normed, rows_, embed), products);
    contexts_ = Room();
    return ffi::Error::Success();
  }

  // The head of a row's new token, of what the first, second or third matrix gave.
  const float* At(int which, int64_t row, int64_t token, int64_t head) const {
    return projected_[which].get() + Offset(row, token, head);
  }
  float* ContextAt(int64_t row, int64_t token, int64_t head) const {
    return contexts_.get() + Offset(row, token, head);
  }

  // ``work(row, head, scores)`` of every head of every row, each query of which sees so many
  // tokens at most; there is room for their scores.
  template <typename Work>
  void ForHeads(int64_t num_seen, const Work& work) const {
    const bool worth_it = batch * heads * num_used * num_seen * head_dim > kProductsWorthSharing;
    Share(pool_, batch * heads, worth_it, [&](int64_t piece) {
      std::vector<float> scores(length + kLanes);
      work(piece / heads, piece % heads, scores.data());
    });
  }

  void AddContexts(ffi::Result<ffi::Buffer<ffi::F32>>& outputs) const {
    ClearUnused(outputs, rows_);
    MultiplyAll(pool_, Inputs(contexts_.get(), rows_, heads * head_dim),
                {{matrices_.back(), outputs->typed_data(), states_.typed_data()}});
  }

 private:
  std::unique_ptr<float[]> Room() const {
    return std::unique_ptr<float[]>(new float[batch * num_new * heads * head_dim]);
  }
  int64_t Offset(int64_t row, int64_t token, int64_t head) const {
    return ((row * num_new + token) * heads + head) * head_dim;
  }

  ffi::ThreadPool& pool_;
  const ffi::Buffer<ffi::F32>& states_;
  const std::vector<int64_t> rows_;
  std::vector<Matrix> matrices_;
  std::vector<std::unique_ptr<float[]>> projected_;
  std::unique_ptr<float[]> contexts_;
};

// XLA gives input and output one place; where it does not, the cache is copied.
void UpdateInPlace(const ffi::Buffer<ffi::F32>& old, ffi::ResultBuffer<ffi::F32>& updated) {
  if (updated->typed_data() != old.typed_data()) {
    std::memcpy(updated->typed_data(), old.typed_data(), old.size_bytes());
  }
}

// Self-attention of new tokens over a cache, into which they are written first: at ``starts``
// [batch]. Bias by distance [heads, length], or nothing. Keys after their query, and all
// values beyond a row's length, are never read.
ffi::Error Extend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> states, ffi::Buffer<ffi::S32> used,
                  ffi::Buffer<ffi::F32> norm_scale, ffi::Buffer<ffi::F32> norm_bias,
                  ffi::Buffer<ffi::F32> old_keys, ffi::Buffer<ffi::F32> old_values,
                  ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::F32> bias,
                  ffi::RemainingArgs matrices, ffi::ResultBuffer<ffi::F32> outputs,
                  ffi::ResultBuffer<ffi::F32> keys, ffi::ResultBuffer<ffi::F32> values,
                  float epsilon, bool centred, float scale) {
  Attention attention(pool, states, used, old_keys);
  const int64_t length = attention.length, head_dim = attention.head_dim;
  const int64_t num_used = attention.num_used;
  if (attention.num_new > length) {
    return ffi::Error::InvalidArgument("more new tokens than the cache holds");
  }
  const ffi::Error error = attention.Project(4, matrices, {norm_scale, norm_bias, epsilon, centred});
  if (error.failure()) return error;
  UpdateInPlace(old_keys, keys);
  UpdateInPlace(old_values, values);
  const bool has_bias = bias.element_count() > 0;
  const int32_t* last = std::max_element(starts.typed_data(), starts.typed_data() + attention.batch);
  const int64_t most = std::min(*last + num_used, length);
  attention.ForHeads(most, [&](int64_t row, int64_t head, float* scores) {
    const int64_t at = (row * attention.heads + head) * length * head_dim;
    float* head_keys = keys->typed_data() + at;
    float* head_values = values->typed_data() + at;
    const int64_t start = starts.typed_data()[row];
    // As XLA's updates: a start that would run over the end is moved back.
    const int64_t place = std::max<int64_t>(0, std::min(start, length - num_used));
    for (int64_t i = 0; i < num_used; ++i) {
      const int64_t to = (place + i) * head_dim;
      std::memcpy(head_keys + to, attention.At(1, row, i, head), 4 * head_dim);
      std::memcpy(head_values + to, attention.At(2, row, i, head), 4 * head_dim);
    }
    for (int64_t i = 0; i < num_used; ++i) {
      const int64_t visible = std::max<int64_t>(1, std::min(start + i + 1, length));
      // By distance: that of the first key is the largest.
      const float* farthest = bias.typed_data() + head * length + visible - 1;
      AttendOne(attention.At(0, row, i, head), head_keys, head_values,
                [=](int64_t j) { return j * head_dim; },
                [=](int64_t j) { return has_bias ? farthest[-j] : 0.0f; }, visible, head_dim,
                scale, scores, attention.ContextAt(row, i, head));
    }
  });
  attention.AddContexts(outputs);
  return ffi::Error::Success();
}

// The same for tokens of any positions, each written to a separate slot.
//
// slots [batch, new]; slot_positions [batch, length], the place in its text of what a slot
// holds; visible [batch, new, length], the slots of each token's text, itself included. A
// text's tokens are added up in their order, in any slots, as ``Extend`` adds them.
ffi::Error ExtendNodes(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> states,
                       ffi::Buffer<ffi::S32> used, ffi::Buffer<ffi::F32> norm_scale,
                       ffi::Buffer<ffi::F32> norm_bias, ffi::Buffer<ffi::F32> old_keys,
                       ffi::Buffer<ffi::F32> old_values, ffi::Buffer<ffi::S32> slots,
                       ffi::Buffer<ffi::S32> slot_positions, ffi::Buffer<ffi::PRED> visible,
                       ffi::Buffer<ffi::F32> bias, ffi::RemainingArgs matrices,
                       ffi::ResultBuffer<ffi::F32> outputs, ffi::ResultBuffer<ffi::F32> keys,
                       ffi::ResultBuffer<ffi::F32> values, float epsilon, bool centred,
                       float scale) {
  Attention attention(pool, states, used, old_keys);
  const int64_t batch = attention.batch, num_new = attention.num_new;
  const int64_t num_used = attention.num_used;
  const int64_t length = attention.length, head_dim = attention.head_dim;
  const ffi::Error error = attention.Project(4, matrices, {norm_scale, norm_bias, epsilon, centred});
  if (error.failure()) return error;
  UpdateInPlace(old_keys, keys);
  UpdateInPlace(old_values, values);
  const bool has_bias = bias.element_count() > 0;
  // The slots of each token's text in the order of the text: once, for all heads.
  std::vector<int32_t> texts(batch * num_new * length);
  std::vector<int64_t> text_lengths(batch * num_new);
  for (int64_t query = 0; query < batch * num_new; ++query) {
    const int32_t* position_of = slot_positions.typed_data() + query / num_new * length;
    const bool* sees = visible.typed_data() + query * length;
    int32_t* text = texts.data() + query * length;
    std::fill(text, text + length, -1);
    for (int64_t slot = 0; slot < length; ++slot) {
      const int32_t position = position_of[slot];
      if (sees[slot] && 0 <= position && position < length) text[position] = slot;
    }
    text_lengths[query] = std::remove(text, text + length, -1) - text;
  }
  const int64_t most = *std::max_element(text_lengths.begin(), text_lengths.end());
  attention.ForHeads(most, [&](int64_t row, int64_t head, float* scores) {
    const int64_t at = (row * attention.heads + head) * length * head_dim;
    float* head_keys = keys->typed_data() + at;
    float* head_values = values->typed_data() + at;
    for (int64_t i = 0; i < num_used; ++i) {
      const int64_t slot = slots.typed_data()[row * num_new + i];
      if (slot < 0 || slot >= length) continue;
      std::memcpy(head_keys + slot * head_dim, attention.At(1, row, i, head), 4 * head_dim);
      std::memcpy(head_values + slot * head_dim, attention.At(2, row, i, head), 4 * head_dim);
    }
    for (int64_t i = 0; i < num_used; ++i) {
      const int64_t query = row * num_new + i, seen = text_lengths[query];
      const int32_t* text = texts.data() + query * length;
      float* context = attention.ContextAt(row, i, head);
      if (seen == 0) {
        std::fill(context, context + head_dim, 0.0f);
        continue;
      }
      const float* farthest = bias.typed_data() + head * length + seen - 1;
      AttendOne(attention.At(0, row, i, head), head_keys, head_values,
                [=](int64_t j) { return text[j] * head_dim; },
                [=](int64_t j) { return has_bias ? farthest[-j] : 0.0f; }, seen, head_dim, scale,
                scores, context);
    }
  });
  attention.AddContexts(outputs);
  return ffi::Error::Success();
}

// Attention of new tokens to sources: mask [inputs, length] is added to the scores. Each input
// has as many rows, one after the other.
ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> states, ffi::Buffer<ffi::S32> used,
                  ffi::Buffer<ffi::F32> norm_scale, ffi::Buffer<ffi::F32> norm_bias,
                  ffi::Buffer<ffi::F32> keys, ffi::Buffer<ffi::F32> values,
                  ffi::Buffer<ffi::F32> mask, ffi::RemainingArgs matrices,
                  ffi::ResultBuffer<ffi::F32> outputs, float epsilon, bool centred, float scale) {
  Attention attention(pool, states, used, keys);
  const int64_t length = attention.length, head_dim = attention.head_dim;
  const ffi::Error error = attention.Project(2, matrices, {norm_scale, norm_bias, epsilon, centred});
  if (error.failure()) return error;
  attention.ForHeads(length, [&](int64_t row, int64_t head, float* scores) {
    const int64_t input = row * keys.dimensions()[0] / attention.batch;
    const int64_t source = (input * attention.heads + head) * length * head_dim;
    const float* row_mask = mask.typed_data() + input * length;
    // Padding at the end has no weight, unless there is nothing but padding.
    int64_t seen = length;
    while (seen > 0 && row_mask[seen - 1] < 0) --seen;
    if (seen == 0) seen = length;
    for (int64_t i = 0; i < attention.num_used; ++i) {
      AttendOne(attention.At(0, row, i, head), keys.typed_data() + source,
                values.typed_data() + source, [=](int64_t j) { return j * head_dim; },
                [=](int64_t j) { return row_mask[j]; }, seen, head_dim, scale, scores,
                attention.ContextAt(row, i, head));
    }
  });
  attention.AddContexts(outputs);
  return ffi::Error::Success();
}

// Attention of whole sequences: every token to all that ``allowed`` [batch, 1, new, new] lets it
// see; bias [1, heads, new, new].
ffi::Error AttendWhole(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> states,
                       ffi::Buffer<ffi::S32> used, ffi::Buffer<ffi::F32> norm_scale,
                       ffi::Buffer<ffi::F32> norm_bias, ffi::Buffer<ffi::PRED> allowed,
                       ffi::Buffer<ffi::F32> bias, ffi::RemainingArgs matrices,
                       ffi::ResultBuffer<ffi::F32> outputs, float epsilon, bool centred,
                       float scale, int64_t head_dim) {
  const int64_t heads = bias.dimensions()[1], length = states.dimensions()[1];
  Attention attention(pool, states, used, heads, length, head_dim);
  const ffi::Error error =
      attention.Project(4, matrices, {norm_scale, norm_bias, epsilon, centred});
  if (error.failure()) return error;
  const int64_t num_used = attention.num_used;
  attention.ForHeads(num_used, [&](int64_t row, int64_t head, float* scores) {
    for (int64_t i = 0; i < num_used; ++i) {
      const float* by_position = bias.typed_data() + (head * length + i) * length;
      const bool* sees = allowed.typed_data() + (row * length + i) * length;
      AttendOne(attention.At(0, row, i, head), attention.At(1, row, 0, head),
                attention.At(2, row, 0, head), [=](int64_t j) { return j * heads * head_dim; },
                [=](int64_t j) { return by_position[j] + (sees[j] ? 0.0f : kMasked); }, num_used,
                head_dim, scale, scores, attention.ContextAt(row, i, head));
    }
  });
  attention.AddContexts(outputs);
  return ffi::Error::Success();
}

// What all calls on a layer's inputs take first: they, how many count, and their norm.
auto BindLayer() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::Buffer<ffi::F32>>()
      .Arg<ffi::Buffer<ffi::S32>>()
      .Arg<ffi::Buffer<ffi::F32>>()
      .Arg<ffi::Buffer<ffi::F32>>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecT5XMultiply, Multiply,
                              BindLayer()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<float>("epsilon")
                                  .Attr<bool>("centred"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecT5XDot, Dot);

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecT5XNormalize, Normalize,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("epsilon")
                                  .Attr<bool>("centred"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecT5XSummarize, Summarize,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("with_sums"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecT5XStandardize, Standardize,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("top_k")
                                  .Attr<float>("top_p")
                                  .Attr<float>("least_temperature"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecT5XCompare, Compare);

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecT5XSample, Sample);

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecT5XSampleResidual, SampleResidual);

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecT5XExtend, Extend,
                              BindLayer()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("epsilon")
                                  .Attr<bool>("centred")
                                  .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecT5XExtendNodes, ExtendNodes,
                              BindLayer()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("epsilon")
                                  .Attr<bool>("centred")
                                  .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecT5XAttend, Attend,
                              BindLayer()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("epsilon")
                                  .Attr<bool>("centred")
                                  .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecT5XAttendWhole, AttendWhole,
                              BindLayer()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("epsilon")
                                  .Attr<bool>("centred")
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("head_dim"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecT5XThreefry, Threefry);
