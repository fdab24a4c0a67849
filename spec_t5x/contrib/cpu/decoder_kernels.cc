// Decoder steps on a CPU: matrix products of few rows, and attention over a cache.
//
// A decoder step reads every weight once for a few rows, so memory bounds its time. XLA's
// matrix-vector products use one thread below some size, and its products of 2 to 16 rows
// read weights at a third of the memory's speed; these kernels read them at the full speed,
// with all threads, for any number of rows.
//
// Every row is computed by the same additions in the same order, for any number of rows and
// any division among threads: verifying gamma + 1 tokens gives, bit for bit, the logits that
// decoding them one by one gives.
//
// ``used`` is the number of tokens of each batch row to compute, for verification of fewer
// tokens than the arrays have room for; the outputs of the other tokens are zeros.

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

// Floats of a vector register, and number of registers. Vectors wider than one register would
// go through memory in GCC.
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

// A cast, because GCC may compile memcpy to two 32-byte copies through the stack, and a load
// that spans two stores waits for both (4 times slower on Ice Lake).
inline Lanes Load(const float* from) { return *reinterpret_cast<const Lanes*>(from); }

// bfloat16 is the upper half of a float. GCC would widen each half of a register separately.
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

// Two 4-bit weights, -8 to 7: column c of a panel in the low bits, column c + 32 in the high bits.
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

// a * b + c, always with one rounding. Left to itself, a compiler fuses the operations in some
// loops and, for processors with slow chains of FMAs (Zen, Sapphire Rapids), not in others, so
// that these would differ in bits.
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

// ``value`` in all lanes. ``Lanes{} + value`` would cost an addition in GCC.
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

// The sum of all lanes, by adding the upper half to the lower until one number is left.
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

// Makes the compiler hold a value in a register, instead of loading it again for each use.
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

// Threads that help the calling one. A decoder step has dozens of rounds of work, microseconds
// apart, so helpers spin until the next round, and sleep after kPatience without any.
class Helpers {
 public:
  // Never destroyed, because its threads use it until the process ends.
  static Helpers& Of(int64_t num) {
    static Helpers* const helpers = new Helpers(num);
    return *helpers;
  }

  // Calls ``work(piece)`` for every piece, in this thread and the helpers, and returns true; does
  // nothing and returns false if another caller has them. This thread takes pieces as well and
  // waits only for pieces that a helper has begun, so it finishes even if all helpers sleep.
  template <typename Work>
  bool Run(int64_t pieces, const Work& work) {
    if (pieces > kMask || is_busy_.exchange(true)) return false;
    constexpr auto kRelaxed = std::memory_order_relaxed;
    call_.store([](const void* work, int64_t piece) { (*static_cast<const Work*>(work))(piece); },
                kRelaxed);
    work_.store(&work, kRelaxed);
    done_.store(0, kRelaxed);
    // A helper that reads the new state also reads the values stored above.
    const uint64_t round = state_.load() >> (2 * kBits);
    state_ = (round + 1) << (2 * kBits) | uint64_t(pieces) << kBits;
    if (num_asleep_ > 0) {
      // A helper holds the mutex until it sleeps, so none misses the notification.
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
      // The exchange fails unless this piece is still free. Then its round is not finished, so
      // ``call`` and ``work``, read above, belong to this round.
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
  // Packed: number of the round, number of its pieces, and number of pieces taken.
  std::atomic<uint64_t> state_{0};
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> work_{nullptr};
  std::atomic<int64_t> done_{0};
  std::atomic<int> num_asleep_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// Calls ``work(piece)`` for every piece; if ``worth_it``, with as many threads as XLA's pool has.
template <typename Work>
void Share(ffi::ThreadPool& pool, int64_t pieces, bool worth_it, const Work& work) {
  const int64_t num_threads = worth_it && pieces > 1 ? pool.num_threads() : 1;
  if (num_threads > 1 && Helpers::Of(num_threads - 1).Run(pieces, work)) return;
  for (int64_t piece = 0; piece < pieces; ++piece) work(piece);
}

// Bytes of weights below which waking another thread costs more time than it saves.
constexpr int64_t kBytesWorthSharing = 96 * 1024;

// Number of pieces for work on ``bytes`` of weights: large enough that taking a piece costs little,
// and small enough that all threads finish at about the same time.
int64_t NumPieces(const ffi::ThreadPool& pool, size_t bytes) {
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  return std::clamp<int64_t>(bytes / kBytesWorthSharing, threads, 4 * threads);
}

// Number of tokens of each row to compute: ``used``, at most ``num_new``.
int64_t NumUsed(const ffi::Buffer<ffi::S32>& used, int64_t num_new) {
  return std::clamp<int64_t>(*used.typed_data(), 0, num_new);
}

// Indices of the rows to compute in inputs ``[..., new, width]``: ``used`` of each ``new``.
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

// Sets the output rows that are not in ``rows`` to zero.
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
// Weights are in panels of kColumnBlock columns, stored one after the other, so that memory is
// read sequentially. bfloat16 takes half the bytes and is widened in registers, which is exact.

constexpr int kColumnBlock = 64;
// Registers that hold a row of a panel.
constexpr int kBlockWidth = kColumnBlock / kLanes;
// Bytes of a panel that all groups of inputs use while they are in the first-level cache. Each group
// widens them again: weights that one group widened and stored would take longer to read.
constexpr int64_t kBlockBytes = 16 * 1024;
// Rows of a panel for which 4-bit weights have one scale for each column.
constexpr int kScaledRows = 64;

// Number of array elements of a row of a panel.
template <typename Weight>
constexpr int kRowLength = kColumnBlock;
template <>
constexpr int kRowLength<Nibbles> = kColumnBlock / 2;

// Loads the weights of kLanes columns, from ``column`` on, of a row of a panel.
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

// Most registers of columns whose sums, for ``rows`` inputs, fit beside the weights and a factor.
constexpr int PartWidth(int rows) {
  int width = kBlockWidth;
  // With one row, weights are operands in memory and take no register.
  while (width > 1 && rows * width + (rows > 1 ? width + 1 : 2) > kRegisters) width /= 2;
  return width;
}

constexpr int kCacheLine = 64;

// Inputs of products, [rows, inner]: the rows to compute, in groups of up to kMostInGroup.
class Inputs {
 public:
  static constexpr int64_t kMostInGroup = 6;

  Inputs(const float* inputs, const std::vector<int64_t>& rows, int64_t inner)
      : inputs_(inputs), rows_(rows), inner_(inner) {}

  int64_t inner() const { return inner_; }
  // Groups are full except the last; groups of similar size would take as long.
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

// Distance of prefetches in bytes, measured: far enough that the data arrive in time.
constexpr int64_t kAhead = 8192;

// Prefetches during a pass over a block: two cache lines of the next block for each k, so that
// memory is never idle. With stride 0 it prefetches the same two lines again.
struct Ahead {
  const char* begin;
  int64_t stride;

  // The lines to prefetch in pass ``part`` of ``parts`` over the same block.
  Ahead Part(int part, int parts) const {
    const int lines = std::max<int>(stride / kCacheLine, 1), each = std::max(lines / parts, 1);
    return part * each < lines ? Ahead{begin + part * each * kCacheLine, stride}
                               : Ahead{begin, 0};
  }
};

// Rows first_k to first_k + num_k of a panel. The products with the block from 0 on are stored in
// the outputs, those with later blocks are added to them.
template <typename Weight>
struct Block {
  const Weight* weights;
  int64_t first_k, num_k;
  // Factors of the columns' sums over these rows; null if the weights have no scales.
  const float* scales;
};

// Multiplies a group of inputs by kWidth registers of a block's columns, from ``column`` on.
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

// Multiplies a group of inputs by a block, in passes over as many columns as PartWidth allows.
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

// Multiplies group number ``group`` of the inputs by a block.
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

// Multiplies all inputs by a panel; ``scales`` has a row for each block, or is null.
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
  const int64_t most = scales ? kScaledRows : kBlockBytes / kRowSize;
  for (int64_t k = 0; k < inner; k += most) {
    const int64_t num_k = std::min(most, inner - k);
    const Weight* weights = panel + k * kRowLength<Weight>;
    const char* next = reinterpret_cast<const char*>(weights) + std::max(num_k * kRowSize, kAhead);
    const float* block_scales = scales ? scales + k / kScaledRows * kColumnBlock : nullptr;
    for (int64_t group = 0; group < groups; ++group) {
      const Ahead ahead = {next, group ? 0 : kRowSize};
      MultiplyBlock<Weight>(inputs, group, {weights, k, num_k, block_scales}, ahead, outputs,
                            stride);
    }
  }
}

// Number of scales of a panel of ``inner`` rows; -1 for types that weights cannot have.
int64_t ScalesOfPanel(ffi::DataType type, int64_t inner) {
  if (type == ffi::F32 || type == ffi::BF16) return 0;
  if (type == ffi::S8) return kColumnBlock;
  return type == ffi::U8 ? (inner + kScaledRows - 1) / kScaledRows * kColumnBlock : -1;
}

// A matrix among the arguments of a call.
struct Matrix {
  // Weights [panels, inner, kColumnBlock]; 4-bit ones have half as many bytes.
  ffi::AnyBuffer panels;
  // int8 has one scale for each column, 4 bits one for each column of a block.
  const float* scales;
  // Bias of the columns; null for none.
  const float* bias;
  int64_t columns;

  int64_t num_panels() const { return (columns + kColumnBlock - 1) / kColumnBlock; }
};

// A product with a matrix: the outputs receive inputs * matrix + bias + residual (null for none).
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
      // The last panel has columns of padding, which the outputs do not have.
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

// Computes several products of the same inputs. Panels of all matrices are shared among the
// threads together, so that these are woken once and do not wait between short products.
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

// Matrices in the arguments of a call: the panels of all, then all scales, then all biases.
class Matrices {
 public:
  Matrices(ffi::RemainingArgs arguments) : arguments_(arguments), num_(arguments.size() / 3) {}

  // Appends the next matrix, [inner, columns], to ``matrices``, or returns an error if none fits.
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

// Layer norm of rows: inputs / sqrt(mean(inputs ** 2) + epsilon) * scale + bias. If ``centred``,
// the row's mean is subtracted first. T5's norm has neither mean nor bias, GPT-2's has both.
struct Norm {
  // An empty scale means that there is no norm; an empty bias adds nothing.
  const ffi::Buffer<ffi::F32>&scale, &bias;
  float epsilon;
  bool centred;

  // Returns ``rows`` normed, in the new array ``to``; or the inputs, if there is no norm.
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

// Multiplies a layer's normed inputs by each matrix; adds ``residual`` to a single product.
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

// outputs[row, n] = sum over k of inputs[row, k] * table[n, k]: logits by a table of embeddings,
// the tied output layer.

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

// Number of rows of the table that stay in a near cache while all groups of inputs use them.
constexpr int64_t kTokenBlock = 16;

// Computes the logits of tokens ``begin`` to ``end`` for all rows of the inputs.
template <typename Weight>
void DotTokens(const float* inputs, const std::vector<int64_t>& rows, int64_t inner,
               const Weight* table, int64_t begin, int64_t end, int64_t vocab, float* outputs) {
  using Block = void (*)(const float*, int64_t, const int64_t*, const Weight*, int64_t, float*);
  constexpr Block kBlocks[] = {DotBlock<Weight, 1, 4>, DotBlock<Weight, 2, 4>, DotBlock<Weight, 3, 4>,
                               DotBlock<Weight, 4, 4>, DotBlock<Weight, 5, 4>, DotBlock<Weight, 6, 4>};
  constexpr Block kTails[] = {DotBlock<Weight, 1, 1>, DotBlock<Weight, 2, 1>, DotBlock<Weight, 3, 1>,
                              DotBlock<Weight, 4, 1>, DotBlock<Weight, 5, 1>, DotBlock<Weight, 6, 1>};
  // Most rows at a time, whose sums with four tokens fit in the registers.
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

// The array itself: XLA gives kernels row-major operands.
ffi::Error RowMajor(ffi::Buffer<ffi::F32> array, ffi::ResultBuffer<ffi::F32> same) {
  if (same->typed_data() != array.typed_data()) {
    std::copy_n(array.typed_data(), array.element_count(), same->typed_data());
  }
  return ffi::Error::Success();
}

// outputs[row] = table[tokens[row]], NaN for tokens that the table does not have. XLA would have two
// threads look up a few rows, which takes longer than the rows.
ffi::Error LookUp(ffi::Buffer<ffi::S32> tokens, ffi::AnyBuffer table,
                  ffi::ResultBuffer<ffi::F32> outputs) {
  const bool is_narrow = table.element_type() == ffi::U16;
  const int64_t num = tokens.element_count(), vocab = table.dimensions().front();
  const int64_t width = table.dimensions().back();
  if (!(is_narrow || table.element_type() == ffi::F32) ||
      outputs->element_count() != static_cast<size_t>(num * width)) {
    return ffi::Error::InvalidArgument("shapes of a table and its rows do not fit");
  }
  const auto* halves = static_cast<const uint16_t*>(table.untyped_data());
  const auto* floats = static_cast<const float*>(table.untyped_data());
  float* to = outputs->typed_data();
  for (int64_t i = 0; i < num; ++i, to += width) {
    const int64_t token = tokens.typed_data()[i], from = token * width;
    if (token < 0 || token >= vocab) {
      std::fill_n(to, width, NAN);
    } else if (is_narrow) {
      for (int64_t j = 0; j < width; ++j) to[j] = Widened(halves[from + j]);
    } else {
      std::copy_n(floats + from, width, to);
    }
  }
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

// exp(x) for x <= 0, exact to about 1e-7: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
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

// Computes the first index of each row's largest value, and log(sum(exp(values))) of the row.
//
// Blocks of kSummaryBlock values are summed relative to the block's largest value, in several
// threads, and the sums are then rescaled to the row's largest value.
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
  if (!with_sum) return summary;
  if (largest == kLowest) {
    // Nothing is larger than NaN, so all may be NaN, which a sum shows.
    for (i = begin; i < end; ++i) summary.sum += values[i] == kLowest ? 0.0f : values[i];
    return summary;
  }
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

// Number of probabilities below which another thread is not woken to pass over them.
constexpr int64_t kNumbersWorthSharing = 4 * kSummaryBlock;

// Calls work(lanes, i) for each register of values of a row; ``filler`` pads the last one.
template <typename Work>
inline void ForLanes(const float* values, int64_t width, float filler, const Work& work) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) work(Load(values + i), i);
  if (i == width) return;
  float rest[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) rest[lane] = i + lane < width ? values[i + lane] : filler;
  work(Load(rest), i);
}

// Stores a register at values[i], or its first lanes only if the row ends before it.
inline void StoreWithin(float* values, int64_t width, int64_t i, Lanes lanes) {
  if (i + kLanes <= width) {
    Store(values + i, lanes);
  } else {
    for (int lane = 0; i + lane < width; ++lane) values[i + lane] = lanes[lane];
  }
}

// Values of a block of a row. Searches for a threshold skip blocks whose maximum is below a lower
// bound of it.
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

// Returns all values that are at least ``bound``; ``maxima`` are those of BlockMaxima.
std::vector<float> AtLeast(const float* values, int64_t width, const std::vector<float>& maxima,
                           float bound) {
  std::vector<float> found(width + 1);
  int64_t count = 0;
  for (size_t block = 0; block < maxima.size(); ++block) {
    if (!(maxima[block] >= bound)) continue;
    const int64_t begin = block * kCandidateBlock;
    const int64_t end = std::min(width, begin + kCandidateBlock);
    // No branch here, because processors could not predict it.
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

// Returns the ``top_k``-th largest value; kLowest, which keeps all, if there are fewer numbers.
float SmallestKept(const float* values, int64_t width, int64_t top_k) {
  const std::vector<float> maxima = BlockMaxima(values, width);
  // top_k blocks have a maximum of at least this bound, so the top_k-th value is not below it.
  const bool few = top_k <= static_cast<int64_t>(maxima.size());
  const float bound = few ? Largest(maxima, top_k) : kLowest;
  std::vector<float> candidates = AtLeast(values, width, maxima, bound);
  // NaN is never a candidate, so there may be fewer than top_k.
  if (static_cast<int64_t>(candidates.size()) < top_k) return kLowest;
  return Largest(std::move(candidates), top_k);
}

// Keeps the most probable tokens until their mass reaches ``top_p``, and normalizes to sum 1.
void KeepNucleus(float* probs, int64_t width, float largest, float top_p) {
  // All tokens below this bound together have less mass than the nucleus may leave out.
  const float bound = std::max(0.0f, 0.5f * (1.0f - top_p) / width);
  const std::vector<float> candidates = AtLeast(probs, width, BlockMaxima(probs, width), bound);
  // Bisects over the bits of the threshold, which have the order of non-negative floats. A
  // threshold of ``low`` always keeps enough mass, one of ``high`` never does.
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

// Computes the distribution that a row of logits is sampled from: one-hot at the argmax up to
// ``least_temperature``; else the softmax at the temperature, cut by top-k and top-p (0 for none).
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
  // ``inverse`` is the largest probability, because the most probable token has weight exp(0).
  if (top_p > 0) KeepNucleus(probs, width, inverse, top_p);
}

ffi::Error Standardize(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits,
                       ffi::Buffer<ffi::F32> temperatures, ffi::Buffer<ffi::U32> top_k,
                       ffi::Buffer<ffi::F32> top_p, ffi::ResultBuffer<ffi::F32> probs,
                       float least_temperature) {
  const int64_t width = logits.dimensions().back();
  const int64_t rows = logits.element_count() / width;
  for (size_t count : {temperatures.element_count(), top_k.element_count(), top_p.element_count()}) {
    if (static_cast<int64_t>(count) != rows) {
      return ffi::Error::InvalidArgument("a temperature, top_k and top_p are needed for each row");
    }
  }
  Share(pool, rows, rows * width >= kNumbersWorthSharing, [&](int64_t row) {
    StandardizeRow(logits.typed_data() + row * width, width, temperatures.typed_data()[row],
                   top_k.typed_data()[row], top_p.typed_data()[row], least_temperature,
                   probs->typed_data() + row * width);
  });
  return ffi::Error::Success();
}

// Computes sum min(p, q) and sum max(f p - q, 0) for rows p of the target and q of the draft, with
// a factor f for each row of the target. If the target has one more row than the draft, q is 0
// there.
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

// Returns the first index with mass at which the cumulative mass exceeds ``uniform`` times the
// total; the last index with mass if, by rounding, none does.
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

// Draws a row's token with two uniform numbers: a block of about sqrt(width) tokens, then a token
// in it. With a draft, from max(target - draft, 0), or from the target if that is zero everywhere.
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

// Threefry-2x32 with 20 rounds (Salmon et al. 2011): hashes the words (0, counts[row]) under the
// key keys[row] of two words.
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

// out[t] = sum over d of query[d] * keys[t][d], by the same additions for any number kKeys.
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

// Computes kWidth registers of the context at a time, because their sums are independent.
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

// Attention of one head of one query: softmax(scale q K^T + bias) V over ``length`` tokens, summed
// in the order of j. Keys and values of token j are at ``place(j)``, its bias is ``bias(j)``.
// ``scores`` is scratch for ``length`` numbers, rounded up to whole registers.
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

// Bias of forbidden pairs: exp gives zero, unless all pairs of a query are forbidden.
constexpr float kMasked = -1e10f;

// Number of multiplications of attention below which another thread is not woken.
constexpr int64_t kProductsWorthSharing = 10 * 1000;

// A layer's attention. Project multiplies the normed states [batch, new, embed] by the matrices of
// queries, or of queries, keys and values; callers compute the contexts of all heads; AddContexts
// multiplies these by the output matrix and adds the states. Cached keys and values are
// [batch or inputs, heads, length, head_dim].
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

  // Reads ``num`` matrices, and multiplies the normed states by all but the last.
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

  // A head of a row's new token: its query, key or value for ``which`` 0, 1 or 2.
  const float* At(int which, int64_t row, int64_t token, int64_t head) const {
    return projected_[which].get() + Offset(row, token, head);
  }
  float* ContextAt(int64_t row, int64_t token, int64_t head) const {
    return contexts_.get() + Offset(row, token, head);
  }

  // Calls ``work(row, head, scores)`` for every head of every row, with scratch for the scores of a
  // query; ``num_seen`` is the most tokens that a query attends to, which decides on threads.
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

// Copies the cache if XLA did not alias input and output, as it does where it can.
void UpdateInPlace(const ffi::Buffer<ffi::F32>& old, ffi::ResultBuffer<ffi::F32>& updated) {
  if (updated->typed_data() != old.typed_data()) {
    std::memcpy(updated->typed_data(), old.typed_data(), old.size_bytes());
  }
}

// Self-attention of new tokens over a cache, to which their keys and values are written first, at
// ``starts`` [batch]. ``bias`` [heads, length] is by distance of query and key, or empty. Keys
// after their query, and values beyond a row's length, are never read.
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
    // Like XLA's dynamic_update_slice, this moves a start back if the tokens exceed the cache.
    const int64_t place = std::max<int64_t>(0, std::min(start, length - num_used));
    for (int64_t i = 0; i < num_used; ++i) {
      const int64_t to = (place + i) * head_dim;
      std::memcpy(head_keys + to, attention.At(1, row, i, head), 4 * head_dim);
      std::memcpy(head_values + to, attention.At(2, row, i, head), 4 * head_dim);
    }
    for (int64_t i = 0; i < num_used; ++i) {
      const int64_t visible = std::max<int64_t>(1, std::min(start + i + 1, length));
      // The bias is by distance, so key 0 has the last entry.
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

// Self-attention like ``Extend`` for tokens of any positions, each written to a slot of its row.
//
// slots [batch, new]; slot_positions [batch, length], the position in its text of each slot's
// token; visible [batch, new, length], the slots that a token attends to, its own included. Slots
// are summed in the order of the text, as in ``Extend``, so that results are equal bit for bit.
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
  // The slots of each token's text, in the order of the text, computed once for all heads.
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

// Attention of new tokens to sources; ``mask`` [inputs, length] is added to the scores. Each input
// serves batch / inputs consecutive rows.
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
    // Skips padding at the end, which has no weight unless the source is padding alone.
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

// Self-attention of whole sequences, without a cache: query i attends to the keys j for which
// ``allowed`` [batch, 1, new, new] is true, with ``bias`` [1, heads, new, new].
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

// Binds the first arguments of all calls on a layer: inputs, ``used``, norm's scale and bias.
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecT5XLookUp, LookUp);

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecT5XRowMajor, RowMajor);

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
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
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
