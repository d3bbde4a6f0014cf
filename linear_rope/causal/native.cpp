// Causal linear attention with rotation on a CPU, forward and backward, fused and chunk by chunk.
//
// The equations and the arguments are those of operator.py, the plan is that of chunked.py. A task
// is one key head of one batch row, with the query heads that share it: its chunks of C tokens are
// taken one after another, and everything that a chunk needs (features, rotated features, scores)
// lives in a workspace of some hundred kilobytes that stays in the cache. Inputs are read with
// their own strides and dtypes, results are written once. If there are fewer tasks than threads,
// time is cut into segments too: a light pass sums up each segment's state, then all run at once.
//
// For the backward pass the state before each block of chunks is kept. A block is run forward once
// more for the states between its chunks, then backward with the state's gradient.
//
// The file has two parts. The second one, the kernels, is compiled once for each instruction set
// (the file includes itself), and the best one that the processor has is chosen when it runs. No
// header of torch is needed: native.py passes addresses. Threads are those of torch's OpenMP.

#ifndef LINEAR_ROPE_BYTES  // ==== First part: compiled once =======================================

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <new>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

#if !defined(__GNUC__)
#error "the kernels use vector extensions of GCC and clang"
#endif

#define ALWAYS static inline __attribute__((always_inline))
#define ALWAYS_MEMBER inline __attribute__((always_inline))

namespace {

using Int = std::int64_t;

enum Type : Int { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };
enum Phi : Int { NO_MAP, ELU_PLUS_ONE, RELU };
enum Denominator : Int { NO_DENOMINATOR, UNROTATED, ROTATED };

// A tensor (batch, head, time, width); absent if data is null. Strides are in elements.
struct Array {
  char* data;
  Int type, stride[4];
};

// The same in native.py, in the same order.
struct Call {
  Int batch, heads, key_heads, length, M, E, pairs;
  Int phi, denominator, half, chunk, block, threads, level;
  double eps;
  Array q, k, v, cos, sin, g, fresh, S0, z0;
  Array out, den, S, z, starts_S, starts_z;
  Array d_out, dS, dz, dq, dk, dv, dg, dS0, dz0;
};

// One token a row; all arrays are dense, of the type that `wide` says. The same in native.py.
struct Step {
  Int batch, heads, key_heads, M, E, pairs;
  Int phi, denominator, half, threads, level, wide;
  double eps, multiplier;
  const void *q, *k, *v, *g, *S0, *z0;  // g, position and theta may be null
  const Int* position;
  const double* theta;
  void *out, *S, *z;
  Int* next;
};

const double ROTATED_FLOOR = 1e-6;
const float FLOAT16_MAX = 65504.0f;

// Where exponential features are flat, see feature_base.py.
template <class W>
constexpr double log_floor = sizeof(W) == 8 ? -300 : -30;

inline Int size_of(const Array& a) { return a.type == FLOAT64 ? 8 : a.type == FLOAT32 ? 4 : 2; }

inline char* row_at(const Array& a, Int b, Int h, Int t) {
  return a.data + (b * a.stride[0] + h * a.stride[1] + t * a.stride[2]) * size_of(a);
}

// What lies before or after the segments of time of a task, while they run on their own.
template <class W>
struct Segments {
  Int count, blocks;         // segments a task, blocks a segment
  std::vector<W> S, z;       // the gradient of the state after each segment but the last
  std::vector<double> keep;  // what is left at a segment's other end of what came in
};

// A workspace for each thread, which grows as needed and, unless it is large, stays for the next
// call.
struct Arena {
  char* data = nullptr;
  std::size_t size = 0;
  void* get(std::size_t bytes) {
    if (bytes > size) {
      std::free(data);
      size = 0;
      data = static_cast<char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
      if (!data) throw std::bad_alloc();
      size = bytes;
    }
    return data;
  }
  void done() {
    if (size > LARGE) std::free(data), data = nullptr, size = 0;
  }
  ~Arena() { std::free(data); }
  static constexpr std::size_t LARGE = std::size_t(8) << 20;
};

Arena& arena() {
  static thread_local Arena mine;
  return mine;
}

// ---- Threads: a team takes tasks from a common counter ------------------------------------------

template <class Task>
struct Team {
  const Task& task;
  Int count;
  std::atomic<Int> next{0};
  std::atomic<bool> failed{false};
  static void run(void* team) { static_cast<Team*>(team)->work(); }
  void work() {
    try {
      for (Int i; (i = next.fetch_add(1)) < count;) task(i);
    } catch (...) {
      failed = true;
    }
  }
};

// task(0) ... task(count - 1), on the threads that torch uses too if its OpenMP can be found.
template <class Task>
void parallel(Int threads, Int count, const Task& task) {
  using Fork = void (*)(void (*)(void*), void*, unsigned, unsigned);
  Team<Task> team{task, count};
  if (threads < 2 || count < 2) {
    team.work();
  } else {
    Fork fork = nullptr;
#if defined(__unix__) || defined(__APPLE__)
    static void* const found = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    std::memcpy(&fork, &found, sizeof fork);
#endif
    if (fork) {
      fork(&Team<Task>::run, &team, static_cast<unsigned>(threads), 0);
    } else {
      std::vector<std::thread> others;
      for (Int i = 1; i < std::min(threads, count); ++i)
        others.emplace_back(&Team<Task>::run, &team);
      team.work();
      for (std::thread& other : others) other.join();
    }
  }
  if (team.failed) throw std::bad_alloc();
}

// The first touch of a page costs more than to write it: ask for large pages.
void prefer_large_pages(const Array& a, Int elements) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const std::uintptr_t page = std::uintptr_t(1) << 21;
  const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(a.data);
  const std::uintptr_t first = (at + page - 1) / page * page;
  const std::uintptr_t last = (at + elements * size_of(a)) / page * page;
  if (a.data && last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)a, (void)elements;
#endif
}

}  // namespace

#include "native_block.h"

// ==== The second part, once for each instruction set =============================================

#define LINEAR_ROPE_BYTES 16  // what every x86-64 has, and the only one elsewhere (such as ARM)
#define LINEAR_ROPE_LEVEL plain
#if defined(__x86_64__)
#define LINEAR_ROPE_COLUMNS 2
#else
#define LINEAR_ROPE_COLUMNS 4
#endif
#include "native.cpp"
#undef LINEAR_ROPE_BYTES
#undef LINEAR_ROPE_LEVEL
#undef LINEAR_ROPE_COLUMNS

#if defined(__x86_64__)

#define LINEAR_ROPE_BYTES 32
#define LINEAR_ROPE_LEVEL avx2
#define LINEAR_ROPE_COLUMNS 2
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,prfchw"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,prfchw")
#endif
#include "native.cpp"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef LINEAR_ROPE_BYTES
#undef LINEAR_ROPE_LEVEL
#undef LINEAR_ROPE_COLUMNS

#define LINEAR_ROPE_BYTES 64
#define LINEAR_ROPE_LEVEL avx512
#define LINEAR_ROPE_COLUMNS 4
#ifdef __clang__
#pragma clang attribute push(                                                             \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prfchw"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prfchw")
#endif
#include "native.cpp"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__

namespace {

int best_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}

template <class... Arguments>
void dispatch(Int level, bool wide, const Arguments&... arguments) {
  switch (std::min<Int>(level, best_level())) {
#if defined(__x86_64__)
    case 2: return wide ? avx512::run<double>(arguments...) : avx512::run<float>(arguments...);
    case 1: return wide ? avx2::run<double>(arguments...) : avx2::run<float>(arguments...);
#endif
    default: return wide ? plain::run<double>(arguments...) : plain::run<float>(arguments...);
  }
}

template <class... Arguments>
int attempt(Int level, bool wide, const Arguments&... arguments) {
  try {
    dispatch(level, wide, arguments...);
    return 0;
  } catch (...) {
    return 1;
  }
}

}  // namespace

extern "C" {

// 0 plain, 1 AVX2 with FMA, 2 AVX-512: the best instruction set of this processor.
int linear_rope_level() { return best_level(); }

// Sizes of what comes as an address, for the Python side to compare with its own.
int linear_rope_call_size() { return sizeof(Call); }
int linear_rope_step_size() { return sizeof(Step); }
int linear_rope_block_size() { return sizeof(BlockStep); }

// 0, or 1 if memory ran out.
int linear_rope_run(const Call* call, int backward) {
  return attempt(call->level, call->q.type == FLOAT64, *call, backward != 0);
}
int linear_rope_step(const Step* step) { return attempt(step->level, step->wide != 0, *step); }

// The blocks of a model, one after another on the same x. 0, or 1 if memory ran out.
int linear_rope_blocks(const BlockStep* blocks, Int count) {
  for (Int i = 0; i < count; ++i)
    if (attempt(blocks[i].step.level, blocks[i].step.wide != 0, blocks[i])) return 1;
  return 0;
}

}  // extern "C"

#else  // ==== Second part: the kernels ============================================================

namespace {
namespace LINEAR_ROPE_LEVEL {

// ---- Vectors ------------------------------------------------------------------------------------

template <class W>
struct Vec {
  static constexpr int n = LINEAR_ROPE_BYTES / sizeof(W);
  using Word = std::conditional_t<sizeof(W) == 4, std::uint32_t, std::uint64_t>;
  typedef W type __attribute__((vector_size(LINEAR_ROPE_BYTES)));
  typedef Word words __attribute__((vector_size(LINEAR_ROPE_BYTES)));
  using lanes = std::make_integer_sequence<int, n>;
};
template <class W>
using V = typename Vec<W>::type;

template <class W>
ALWAYS V<W> load(const W* p) {
  V<W> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class W>
ALWAYS void store(W* p, const V<W>& v) {
  std::memcpy(p, &v, sizeof v);
}
template <class W>
ALWAYS V<W> splat(W x) {
  return x - V<W>{};
}

// Lanes i... of a, and of b from n on.
template <class W, int... i>
ALWAYS V<W> pick(const V<W>& a, const V<W>& b, std::integer_sequence<int, i...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, i...);
#else
  return __builtin_shuffle(a, b, typename Vec<W>::words{i...});
#endif
}
template <int... i>
using Lanes = std::integer_sequence<int, i...>;

// Lane i from lane i ^ step.
template <class W, int step, int... i>
ALWAYS V<W> swapped(const V<W>& v, Lanes<i...>) {
  return pick<W>(v, v, Lanes<(i ^ step)...>{});
}
template <class W, int step = Vec<W>::n / 2>
ALWAYS W total(const V<W>& v) {
  if constexpr (step == 0)
    return v[0];
  else
    return total<W, step / 2>(v + swapped<W, step>(v, typename Vec<W>::lanes{}));
}

template <class W, int first, int... i>
ALWAYS V<W> each_twice(const V<W>& v, Lanes<i...>) {
  return pick<W>(v, v, Lanes<(first + i / 2)...>{});
}
// to = (sign v0, v0, sign v1, v1, ...), as far as there is room.
template <class W>
ALWAYS void doubled(const V<W>& v, W sign, W* to, Int room) {
  constexpr int n = Vec<W>::n;
  V<W> signs = splat(W(1));
  for (int i = 0; i < n; i += 2) signs[i] = sign;
  store(to, each_twice<W, 0>(v, typename Vec<W>::lanes{}) * signs);
  if (room > n) store(to + n, each_twice<W, n / 2>(v, typename Vec<W>::lanes{}) * signs);
}

// exp(x) for x <= 0 to a unit in the last place or two: 2^n times the Taylor series of exp(r),
// |r| <= log(2)/2. What would be below the normal numbers is 0.
template <class W>
ALWAYS V<W> exponential(const V<W>& x) {
  constexpr bool narrow = sizeof(W) == 4;
  // Adding `magic` leaves the nearest integer of x / log 2 in the lowest bits.
  constexpr W magic = narrow ? W(12582912.0) : W(6755399441055744.0);
  // log(2) = high + low; n times high, which has few bits, is exact.
  constexpr W high = narrow ? W(0.693359375) : W(0.693145751953125);
  constexpr W low = narrow ? W(-2.121944400546905827679e-4) : W(1.428606820309417232121e-6);
  constexpr int bits = narrow ? 23 : 52;
  const V<W> shifted = x * W(1.44269504088896340736) + magic;
  const V<W> n = shifted - magic;
  const V<W> r = (x - n * high) - n * low;
  constexpr int degree = narrow ? 7 : 13;
  W inverse = 1;  // 1 / i!
  for (int i = 2; i <= degree; ++i) inverse /= W(i);
  V<W> sum = splat(inverse);
#pragma GCC unroll 16
  for (int i = degree; i; --i) sum = sum * r + (inverse *= W(i));
  using Words = typename Vec<W>::words;
  const Words one = (Words)splat<W>(W(1));
  const V<W> power = (V<W>)(((Words)shifted << bits) + one);
  const V<W> least = splat<W>(narrow ? W(-87) : W(-708));
  return x < least ? V<W>{} : sum * power;
}

// ---- Rows in and out: any dtype, any stride -----------------------------------------------------

template <class To, class From>
ALWAYS To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
ALWAYS float from_bfloat16(std::uint16_t h) { return bits_as<float>(std::uint32_t(h) << 16); }
ALWAYS std::uint16_t to_bfloat16(float x) {
  const std::uint32_t u = bits_as<std::uint32_t>(x);
  const std::uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;  // to nearest, ties to even
  return std::uint16_t((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
ALWAYS float from_float16(std::uint16_t h) {
  const std::uint32_t sign = std::uint32_t(h & 0x8000u) << 16, rest = h & 0x7fffu;
  // The exponents' biases differ by 112; as a product this is right for subnormal numbers too.
  const float value = bits_as<float>(rest << 13) * bits_as<float>(0x77800000u);
  const std::uint32_t special = rest >= 0x7c00u ? 0x7f800000u : 0u;
  return bits_as<float>(bits_as<std::uint32_t>(value) | special | sign);
}
ALWAYS std::uint16_t to_float16(float x) {
  const std::uint32_t u = bits_as<std::uint32_t>(x), sign = (u >> 16) & 0x8000u;
  const std::uint32_t a = u & 0x7fffffffu;
  // Normal numbers: shift the bias and round. Subnormal ones: adding 0.5 lets the sum round.
  const std::uint32_t normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  const std::uint32_t tiny = bits_as<std::uint32_t>(bits_as<float>(a) + 0.5f) - 0x3f000000u;
  std::uint32_t out = a < 0x38800000u ? tiny : normal;
  out = a >= 0x477ff000u ? 0x7c00u : out;
  out = a > 0x7f800000u ? 0x7e00u : out;
  return std::uint16_t(out | sign);
}

// One element's type, and how to come from it and to it.
template <class W>
struct As {
  using T = W;
  ALWAYS_MEMBER static W from(T x) { return x; }
  ALWAYS_MEMBER static T to(W x) { return x; }
};
struct AsBFloat16 {
  using T = std::uint16_t;
  ALWAYS_MEMBER static float from(T x) { return from_bfloat16(x); }
  ALWAYS_MEMBER static T to(float x) { return to_bfloat16(x); }
};
struct AsFloat16 {
  using T = std::uint16_t;
  ALWAYS_MEMBER static float from(T x) { return from_float16(x); }
  ALWAYS_MEMBER static T to(float x) { return to_float16(x); }
};

// Rows of tokens t, t + 1, ..., n wide, to or from a matrix with rows `ld` apart.
struct Rows {
  const Array& a;
  Int b, h, t, count, n, ld;
};

template <class W, class Kind>
void read_as(const Rows& r, W* to) {
  using T = typename Kind::T;
  const Int step = r.a.stride[2] * sizeof(T), stride = r.a.stride[3];
  const char* at = row_at(r.a, r.b, r.h, r.t);
  for (Int row = 0; row < r.count; ++row, at += step, to += r.ld) {
    const T* const from = reinterpret_cast<const T*>(at);
    Int i = 0;
    if (stride != 1)
      for (; i < r.n; ++i) to[i] = Kind::from(from[i * stride]);
    if constexpr (std::is_same_v<W, T>)
      for (; i + Vec<W>::n <= r.n; i += Vec<W>::n) store(to + i, load(from + i));
    for (; i < r.n; ++i) to[i] = Kind::from(from[i]);
    for (; i < r.ld; ++i) to[i] = 0;
  }
}
template <class W, class Kind>
void write_as(const Rows& r, const W* from) {
  using T = typename Kind::T;
  const Int step = r.a.stride[2] * sizeof(T), stride = r.a.stride[3];
  char* at = row_at(r.a, r.b, r.h, r.t);
  for (Int row = 0; row < r.count; ++row, at += step, from += r.ld) {
    T* const to = reinterpret_cast<T*>(at);
    Int i = 0;
    if (stride != 1)
      for (; i < r.n; ++i) to[i * stride] = Kind::to(from[i]);
    if constexpr (std::is_same_v<W, T>)
      for (; i + Vec<W>::n <= r.n; i += Vec<W>::n) store(to + i, load(from + i));
    for (; i < r.n; ++i) to[i] = Kind::to(from[i]);
  }
}

// Into a matrix of W, padded with zeros; and out of one.
template <class W>
void read(const Rows& rows, W* to) {
  if constexpr (sizeof(W) == 8)
    read_as<W, As<W>>(rows, to);
  else if (rows.a.type == FLOAT32)
    read_as<W, As<W>>(rows, to);
  else if (rows.a.type == BFLOAT16)
    read_as<W, AsBFloat16>(rows, to);
  else
    read_as<W, AsFloat16>(rows, to);
}
template <class W>
void write(const Rows& rows, const W* from) {
  if constexpr (sizeof(W) == 8)
    write_as<W, As<W>>(rows, from);
  else if (rows.a.type == FLOAT32)
    write_as<W, As<W>>(rows, from);
  else if (rows.a.type == BFLOAT16)
    write_as<W, AsBFloat16>(rows, from);
  else
    write_as<W, AsFloat16>(rows, from);
}

// ---- Products of small matrices -----------------------------------------------------------------

constexpr Int ROWS = 4, COLUMNS = LINEAR_ROPE_COLUMNS;  // rows and vectors of a tile in registers

template <class W>
constexpr Int padded(Int n) {
  constexpr Int unit = Vec<W>::n > ROWS ? Vec<W>::n : ROWS;
  return (n + unit - 1) / unit * unit;
}

// A matrix as rows of the left factor: element (i, k) is at[i * row + k * depth].
template <class W>
struct Left {
  const W* at;
  Int row, depth;
};

template <class W, int J>
ALWAYS void tile(Int k0, Int k1, const Left<W>& a, const W* b, Int ldb, const W* from, W* to,
                 Int ld) {
  V<W> sum[ROWS][J];
  for (Int i = 0; i < ROWS; ++i)
    for (Int j = 0; j < J; ++j)
      sum[i][j] = from ? load(from + i * ld + j * Vec<W>::n) : V<W>{};
  for (Int k = k0; k < k1; ++k) {
    V<W> row[J];
    for (Int j = 0; j < J; ++j) row[j] = load(b + k * ldb + j * Vec<W>::n);
    for (Int i = 0; i < ROWS; ++i) {
      const V<W> x = splat<W>(a.at[i * a.row + k * a.depth]);
      for (Int j = 0; j < J; ++j) sum[i][j] += x * row[j];
    }
  }
  for (Int i = 0; i < ROWS; ++i)
    for (Int j = 0; j < J; ++j) store(to + i * ld + j * Vec<W>::n, sum[i][j]);
}

// Fetches rows that are needed soon into the cache, a few at a time, while products run.
struct Ahead {
  struct {
    const char* at;
    Int step, bytes, rows;
    bool written;
  } arrays[12];
  Int count = 0, array = 0, row = 0, total = 0, pace = 0;

  void start() { count = array = row = total = 0; }
  void spread(Int calls) { pace = total / std::max<Int>(calls, 1) + 1; }
  void add(const Array& a, Int b, Int h, Int t, Int rows, Int width, bool written = false) {
    if (!a.data || rows < 1) return;
    const Int size = size_of(a);
    arrays[count++] = {row_at(a, b, h, t), a.stride[2] * size, width * size, rows, written};
    total += rows;
  }
  ALWAYS_MEMBER void fetch() {
    for (Int n = pace; n && array < count; --n) {
      const auto& from = arrays[array];
      const char* const at = from.at + row * from.step;
      if (from.written)
        for (Int i = 0; i < from.bytes; i += 64) __builtin_prefetch(at + i, 1, 2);
      else
        for (Int i = 0; i < from.bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
      if (++row == from.rows) row = 0, ++array;
    }
  }
};

enum Part {
  WHOLE,
  RESULT_BELOW,  // only the result's elements on and below the diagonal are needed
  LEFT_BELOW,    // the left factor is 0 above the diagonal
  LEFT_ABOVE     // ... below it
};

// to = from + a b for an (m x n) result, rows of b, `from` and `to` `ld` apart; from may be null
// (zeros) or `to`. Rows up to a multiple of ROWS and columns up to whole vectors are written.
template <class W>
void product(Part part, Int m, Int n, Int depth, std::common_type_t<Left<W>> a, const W* b, Int ldb,
             std::common_type_t<const W*> from, W* to, Int ld, Ahead& ahead) {
  constexpr Int lanes = Vec<W>::n, panel = COLUMNS * lanes;
  for (Int j = 0; j < n; j += panel) {
    for (Int i = part == RESULT_BELOW ? j / ROWS * ROWS : 0; i < m; i += ROWS) {
      Int columns = std::min(panel, n - j);
      if (part == RESULT_BELOW) columns = std::min(columns, i + ROWS - j);
      ahead.fetch();
      const Int k0 = part == LEFT_ABOVE ? i : 0;
      const Int k1 = part == LEFT_BELOW ? std::min(depth, i + ROWS) : depth;
      const Left<W> rows{a.at + i * a.row, a.row, a.depth};
      const W* const start = from ? from + i * ld + j : nullptr;
      W* const end = to + i * ld + j;
      switch ((columns + lanes - 1) / lanes) {
        case 1: tile<W, 1>(k0, k1, rows, b + j, ldb, start, end, ld); break;
        case 2: tile<W, 2>(k0, k1, rows, b + j, ldb, start, end, ld); break;
#if LINEAR_ROPE_COLUMNS > 2
        case 3: tile<W, 3>(k0, k1, rows, b + j, ldb, start, end, ld); break;
        default: tile<W, 4>(k0, k1, rows, b + j, ldb, start, end, ld); break;
#endif
      }
    }
  }
}

// Butterflies: in each square of 2 step rows, what is right above goes left below.
template <class W, int step, int... i>
ALWAYS void exchange(V<W>* r, Lanes<i...> lanes) {
  constexpr int n = Vec<W>::n;
  if constexpr (step > 0) {
#pragma GCC unroll 16
    for (int x = 0; x < n; ++x)
      if (!(x & step)) {
        const V<W> a = r[x], b = r[x | step];
        r[x] = pick<W>(a, b, Lanes<((i & step) ? n + (i ^ step) : i)...>{});
        r[x | step] = pick<W>(a, b, Lanes<((i & step) ? n + i : (i | step))...>{});
      }
    exchange<W, step / 2>(r, lanes);
  }
}
// to (n x m) = the transpose of from (m x n), both padded to whole vectors.
template <class W>
void transpose(Int m, Int n, const W* from, Int ld_from, W* to, Int ld_to) {
  constexpr int lanes = Vec<W>::n;
  for (Int i = 0; i < m; i += lanes)
    for (Int j = 0; j < n; j += lanes) {
      V<W> r[lanes];
#pragma GCC unroll 16
      for (int x = 0; x < lanes; ++x) r[x] = load(from + (i + x) * ld_from + j);
      exchange<W, lanes / 2>(r, typename Vec<W>::lanes{});
#pragma GCC unroll 16
      for (int x = 0; x < lanes; ++x) store(to + (j + x) * ld_to + i, r[x]);
    }
}

// ---- Rows of padded matrices --------------------------------------------------------------------

template <class W>
ALWAYS W dot(Int n, const W* a, const W* b) {
  V<W> sum{};
  for (Int i = 0; i < n; i += Vec<W>::n) sum += load(a + i) * load(b + i);
  return total<W>(sum);
}
template <class W>
ALWAYS void scale(Int n, W x, W* a) {
  for (Int i = 0; i < n; i += Vec<W>::n) store(a + i, x * load(a + i));
}
template <class W>
void scale_rows(Int rows, Int n, const W* by, W* a) {
  for (Int r = 0; r < rows; ++r) scale(n, by[r], a + r * n);
}
template <class W>
ALWAYS bool all_zero(Int n, const W* a) {
  for (Int i = 0; i < n; ++i)
    if (a[i] != 0) return false;
  return true;
}
// a / by, and 0 if there is nothing to divide by; through the inverse unless that would overflow.
template <class W>
ALWAYS void divide(Int n, W by, W* a) {
  if (std::abs(by) < 4 * std::numeric_limits<W>::min())
    for (Int i = 0; i < n; ++i) a[i] = by == 0 ? W(0) : a[i] / by;
  else
    scale(n, 1 / by, a);
}

template <class W>
ALWAYS W divisor_of(W den, bool turned) {
  const W floor = W(ROTATED_FLOOR);
  return !turned ? den : den < 0 ? std::min(den, -floor) : std::max(den, floor);
}

// phi of n numbers (whole vectors) in place.
template <class W>
ALWAYS void map_features(Int phi, double eps, Int n, W* x) {
  constexpr Int lanes = Vec<W>::n;
  const V<W> zero{}, floor = splat(W(log_floor<W>));
  if (phi == ELU_PLUS_ONE)
    for (Int i = 0; i < n; i += lanes) {
      const V<W> y = load(x + i), down = y > zero ? zero : y;
      store(x + i, exponential<W>(down < floor ? floor : down) + (y < zero ? zero : y));
    }
  else if (phi == RELU)
    for (Int i = 0; i < n; i += lanes) {
      const V<W> y = load(x + i);
      store(x + i, (y < zero ? zero : y) + W(eps));
    }
}

// A token's tables from its `pairs` cosines and sines, in place:
// R f_i = cosine_i f_i + sine_i f_(partner of i).
template <class W>
ALWAYS void spread_tables(bool half, Int pairs, Int Mp, W* cos, W* sin) {
  constexpr Int lanes = Vec<W>::n;
  if (half) {
    std::copy_n(cos, pairs, cos + pairs);
    std::copy_n(sin, pairs, sin + pairs);
    for (Int i = 0; i < pairs; ++i) sin[i] = -sin[i];
  } else {
    for (Int i = (pairs - 1) / lanes * lanes; i >= 0; i -= lanes) {  // from the end: in place
      doubled(load(cos + i), W(1), cos + 2 * i, Mp - 2 * i);
      doubled(load(sin + i), W(-1), sin + 2 * i, Mp - 2 * i);
    }
  }
  for (Int i = 2 * pairs; i < Mp; ++i) cos[i] = 1, sin[i] = 0;
}

// R f, or R^T f with sign -1; in place with the help of `row`.
template <class W>
ALWAYS void turn(bool half, Int pairs, Int Mp, const W* cos, const W* sin, W sign, const W* f,
                 W* row, W* r) {
  if (half) {  // partners in a row of their own
    std::copy_n(f + pairs, pairs, row);
    std::copy_n(f, pairs, row + pairs);
    std::fill(row + 2 * pairs, row + Mp, W(0));
  }
  for (Int i = 0; i < Mp; i += Vec<W>::n) {
    const V<W> x = load(f + i);
    const V<W> y = half ? load(row + i) : swapped<W, 1>(x, typename Vec<W>::lanes{});
    store(r + i, x * load(cos + i) + sign * y * load(sin + i));
  }
}

// ---- A task: a key head of a batch row, and the query heads that share it -----------------------

// Tokens t ... t + size - 1. `fresh`: a document begins here, and nothing is left of the past.
// `slot`: in the backward pass, where the state before the chunk is; -1 if it is zero.
struct Chunk {
  Int t, size, slot;
  bool fresh;
};

template <class W>
class Task {
 public:
  Task(const Call& call, bool backward);
  ~Task() { arena().done(); }
  void forward(Int batch, Int key_head, Int segment, Segments<W>& segments, bool light);
  void backward(Int batch, Int key_head, Int segment, Segments<W>& segments, bool light);

 private:
  const Call& c;
  const Int M, E, Mp, Ep, Cp, group;
  const bool rotates, decays, divides, turned;
  Int b = 0, h = 0;
  bool before = false;  // whether the state before the chunk is other than zero
  bool after = false;   // whether the gradient of the state after it is
  double whole = 1;     // what the chunk leaves of the state before it
  Int end_slot = -1;
  Ahead ahead;
  std::vector<Chunk> chunks;
  std::vector<double> G;  // sums of log decays from the chunk's start
  // Matrices, rows padded to whole vectors, padding zero. f: features, r: the same rotated, a row a
  // token; kt, vt: transposed; Z: a row a token, the denominator's sum of keys; U: its gradient.
  W *S, *z, *fk, *rk, *kt, *v, *Z, *fq, *rq, *scores, *num, *cosine, *sine, *pairs;
  W *vt, *d_scores, *d_num, *dq, *dk, *dv, *dS, *dSt, *dz, *U, *states, *zs;
  // Rows. step: exp(g_t), since: exp(G_t), until: exp(G_C - G_t).
  W *step, *since, *until, *d_den, *sums, *row;

  W* below(W* f, W* r) const { return turned ? r : f; }  // the denominator's features
  Int task() const { return b * c.key_heads + h; }
  Int blocks() const { return (c.length + c.block - 1) / c.block; }
  // States are contiguous: entry `first` of the leading axis, if there is one, of this task.
  W* state_at(const Array& a, Int first = 0) const {
    return reinterpret_cast<W*>(a.data) + (first * c.batch * c.key_heads + task()) * a.stride[1];
  }
  void take_state(const W* from_S, const W* from_z);
  void put_state(W* to_S, W* to_z) const;
  void clear(bool& flag, W* matrix, W* vector) {
    std::memset(matrix, 0, sizeof(W) * Mp * Ep);
    std::memset(vector, 0, sizeof(W) * Mp);
    flag = false;
  }
  void cut(Int block);
  // What a chunk that begins at t will read.
  void soon(Int t, bool queries, bool keys) {
    const Int rows = t < 0 ? 0 : std::min(c.chunk, c.length - t), head = h * group;
    if (queries) {
      ahead.add(c.q, b, head, t, rows, M);
      ahead.add(c.d_out, b, head, t, rows, E);
      if (divides && c.d_out.data) ahead.add(c.out, b, head, t, rows, E);
    }
    if (keys) {
      ahead.add(c.k, b, h, t, rows, M);
      ahead.add(c.v, b, h, t, rows, E);
    }
    ahead.add(c.cos, b, 0, t, rows, c.pairs);
    ahead.add(c.sin, b, 0, t, rows, c.pairs);
  }
  void tables(const Chunk& chunk);
  void features(const Array& a, Int head, const Chunk& chunk, W* f, W* r);
  void rotate(Int n, const W* f, bool back, W* r);
  void keys(const Chunk& chunk);
  void mask(Int size, W* matrix);
  W divisor(W den) const { return divisor_of(den, turned); }
  void queries(const Chunk& chunk);
  void add_to_state(const Chunk& chunk);
  void states_again(Int block);
  void load_gradient(Int head, const Chunk& chunk);
  void add_to_state_gradient(const Chunk& chunk);
  void sum_gradient(const Chunk& chunk, bool first_head);
  void pull_sum_gradient(const Chunk& chunk);
  void chunk_backward(Int number);
  void finish(const Array& dx, Int head, const Chunk& chunk, const W* f, W* d, const W* extra,
              const W* factor, W sign);
};

template <class W>
Task<W>::Task(const Call& call, bool backward)
    : c(call), M(c.M), E(c.E), Mp(padded<W>(M)), Ep(padded<W>(E)), Cp(padded<W>(c.chunk)),
      group(c.heads / c.key_heads), rotates(c.cos.data), decays(c.g.data),
      divides(c.denominator != NO_DENOMINATOR), turned(c.denominator == ROTATED), G(Cp) {
  const Int slots = c.block / c.chunk + 2, back = backward, wide = std::max(Mp, Ep);
  const std::pair<W**, Int> wanted[] = {
      {&rk, Cp * Mp}, {&kt, Cp * Mp}, {&v, Cp * Ep}, {&rq, Cp * Mp}, {&scores, Cp * Cp},
      {&num, Cp * Ep}, {&S, Mp * Ep}, {&z, Mp}, {&row, wide},
      {&Z, divides * Cp * Mp}, {&pairs, decays * Cp * Cp},
      {&cosine, rotates * Cp * Mp}, {&sine, rotates * Cp * Mp},
      {&fk, rotates * Cp * Mp}, {&fq, rotates * Cp * Mp},
      {&step, Cp}, {&since, Cp}, {&until, Cp}, {&d_den, Cp}, {&sums, Cp},
      {&vt, back * Cp * Ep}, {&d_scores, back * Cp * Cp}, {&d_num, back * Cp * Ep},
      {&dq, back * Cp * Mp}, {&dk, back * Cp * Mp}, {&dv, back * Cp * Ep}, {&U, back * Cp * Mp},
      {&dS, back * Mp * Ep}, {&dSt, back * Mp * Ep}, {&dz, back * Mp},
      {&states, back * slots * Mp * Ep}, {&zs, back * slots * Mp}};
  // Whole cache lines, and a gap so that the matrices do not all begin at one place of the cache.
  const auto room = [](Int size) { return (size + 15) / 16 * 16 + 80; };
  Int size = 0;
  for (const auto& want : wanted) size += room(want.second);
  W* at = static_cast<W*>(arena().get(sizeof(W) * size));
  for (const auto& want : wanted) {
    *want.first = at;
    at += room(want.second);
  }
  if (!rotates) fk = rk, fq = rq;
  for (W* x : {step, since, until}) std::fill_n(x, Cp, W(1));
}

// ---- States in and out; chunks ------------------------------------------------------------------

template <class W>
void Task<W>::take_state(const W* from_S, const W* from_z) {
  clear(before, S, z);
  if (from_S)
    for (Int i = 0; i < M; ++i) std::copy_n(from_S + i * E, E, S + i * Ep);
  if (divides && from_z) std::copy_n(from_z, M, z);
  before = !all_zero(Mp * Ep, S) || !all_zero(Mp, z);
}

template <class W>
void Task<W>::put_state(W* to_S, W* to_z) const {
  for (Int i = 0; i < M; ++i) std::copy_n(S + i * Ep, E, to_S + i * E);
  std::copy_n(z, M, to_z);
}

// Cuts a block of time into chunks, also where documents begin.
template <class W>
void Task<W>::cut(Int block) {
  chunks.clear();
  const Int end = std::min(c.length, (block + 1) * c.block), by = c.fresh.stride[2];
  const char* fresh = c.fresh.data ? c.fresh.data + b * c.fresh.stride[0] : nullptr;
  for (Int t = block * c.block, size; t < end; t += size) {
    size = std::min(c.chunk, end - t);
    if (fresh)
      for (Int i = 1; i < size; ++i)
        if (fresh[(t + i) * by]) size = i;
    chunks.push_back({t, size, -1, fresh && fresh[t * by]});
  }
}

// ---- Decay, rotation, features of a chunk -------------------------------------------------------

template <class W>
void Task<W>::tables(const Chunk& chunk) {
  constexpr Int lanes = Vec<W>::n;
  const Int n = chunk.size, P = c.pairs;
  if (decays) {
    read(Rows{c.g, b, h, chunk.t, n, 1, 1}, step);
    double sum = 0;
    for (Int i = 0; i < n; ++i) since[i] = W(G[i] = sum += step[i]);
    for (Int i = 0; i < n; ++i) until[i] = W(sum - G[i]);
    for (W* x : {step, since, until})
      for (Int i = 0; i < n; i += lanes) store(x + i, exponential<W>(load(x + i)));
    whole = std::exp(sum);
    for (Int i = 0; i < n; ++i) {
      W* const x = pairs + i * Cp;
      for (Int j = 0; j <= i; ++j) x[j] = W(G[i] - G[j]);
      for (Int j = 0; j <= i; j += lanes) store(x + j, exponential<W>(load(x + j)));
    }
  }
  if (rotates) {
    read(Rows{c.cos, b, 0, chunk.t, n, P, Mp}, cosine);
    read(Rows{c.sin, b, 0, chunk.t, n, P, Mp}, sine);
    for (Int t = 0; t < n; ++t) spread_tables(c.half, P, Mp, cosine + t * Mp, sine + t * Mp);
  }
}

// R f, or R^T f with `back`; in place too.
template <class W>
void Task<W>::rotate(Int n, const W* f, bool back, W* r) {
  for (Int i = 0; i < n * Mp; i += Mp)
    turn(c.half, c.pairs, Mp, cosine + i, sine + i, W(back ? -1 : 1), f + i, row, r + i);
}

template <class W>
void Task<W>::features(const Array& a, Int head, const Chunk& chunk, W* f, W* r) {
  read(Rows{a, b, head, chunk.t, chunk.size, M, Mp}, f);
  if (c.phi != NO_MAP)
    for (Int t = 0; t < chunk.size; ++t) {
      map_features(c.phi, c.eps, Mp, f + t * Mp);
      std::fill(f + t * Mp + M, f + (t + 1) * Mp, W(0));
    }
  if (r != f) rotate(chunk.size, f, false, r);
}

// Features of the keys, values, and the denominator's sums of keys, which it takes to the end of
// the chunk: z' = exp(G_C) z + sum_t exp(G_C - G_t) phi(k_t).
template <class W>
void Task<W>::keys(const Chunk& chunk) {
  features(c.k, h, chunk, fk, rk);
  read(Rows{c.v, b, h, chunk.t, chunk.size, E, Ep}, v);
  if (!divides) return;
  const W* const f = below(fk, rk);
  for (Int j = 0; j < Mp; j += Vec<W>::n) {
    const V<W> start = load(z + j);
    V<W> sum{};  // of the chunk alone: it is added to the large one once
    for (Int t = 0; t < chunk.size; ++t) {
      sum = sum * step[t] + load(f + t * Mp + j);
      store(Z + t * Mp + j, sum + start * since[t]);
    }
    store(z + j, sum + start * W(whole));
  }
}

// Nothing of later keys, and what is left of earlier ones. Above the diagonal only what products
// read is set to zero.
template <class W>
void Task<W>::mask(Int size, W* matrix) {
  for (Int i = 0; i < size; ++i) {
    W* const x = matrix + i * Cp;
    if (decays)
      for (Int j = 0; j <= i; j += Vec<W>::n)
        store(x + j, load(x + j) * load(pairs + i * Cp + j));
    for (Int j = i + 1; j < (i / ROWS + 1) * ROWS; ++j) x[j] = 0;
  }
}

// ---- Forward ------------------------------------------------------------------------------------

// Segment `s` of time. With `light` only its state is summed up, for the segment behind it.
template <class W>
void Task<W>::forward(Int batch, Int key_head, Int s, Segments<W>& segments, bool light) {
  b = batch, h = key_head;
  const Int first = s * segments.blocks, last = std::min(blocks(), first + segments.blocks);
  double kept = 1;
  if (light)
    clear(before, S, z);
  else if (s)
    take_state(state_at(c.starts_S, first), state_at(c.starts_z, first));
  else
    take_state(c.S0.data ? state_at(c.S0) : nullptr, c.z0.data ? state_at(c.z0) : nullptr);
  for (Int block = first; block < last; ++block) {
    if (!light && (block > first || !s))
      put_state(state_at(c.starts_S, block), state_at(c.starts_z, block));
    cut(block);
    for (const Chunk& chunk : chunks) {
      if (chunk.fresh) clear(before, S, z);
      tables(chunk);
      keys(chunk);
      if (!light) {
        ahead.start();
        ahead.add(c.out, b, h * group, chunk.t, chunk.size, E, true);
        soon(chunk.t + chunk.size, true, true);
        ahead.spread((3 * chunk.size + M) / ROWS);
        queries(chunk);
      }
      add_to_state(chunk);
      kept *= chunk.fresh ? 0 : whole;
    }
  }
  if (light) {
    put_state(state_at(c.starts_S, last), state_at(c.starts_z, last));
    segments.keep[task() * segments.count + s] = kept;
  } else if (s + 1 == segments.count) {
    put_state(state_at(c.S), state_at(c.z));
  }
}

template <class W>
void Task<W>::queries(const Chunk& chunk) {
  const Int n = chunk.size;
  transpose(padded<W>(n), Mp, rk, Mp, kt, Cp);
  for (Int head = h * group; head < (h + 1) * group; ++head) {
    features(c.q, head, chunk, fq, rq);
    // 1. Scores with the keys of the chunk.
    product(RESULT_BELOW, n, padded<W>(n), M, {rq, Mp, 1}, kt, Cp, nullptr, scores, Cp, ahead);
    mask(n, scores);
    // 2. The numerator: of what came before, through the state; then of the chunk.
    if (before) {
      product(WHOLE, n, Ep, M, {rq, Mp, 1}, S, Ep, nullptr, num, Ep, ahead);
      if (decays) scale_rows(n, Ep, since, num);
    }
    product(LEFT_BELOW, n, Ep, n, {scores, Cp, 1}, v, Ep, before ? num : nullptr, num, Ep, ahead);
    // 3. Divide, write.
    if (divides) {
      const W* const f = below(fq, rq);
      for (Int i = 0; i < n; ++i) d_den[i] = dot(Mp, f + i * Mp, Z + i * Mp);
      for (Int i = 0; i < n; ++i) divide(Ep, divisor(d_den[i]), num + i * Ep);
      write(Rows{c.den, b, head, chunk.t, n, 1, 1}, d_den);
    }
    if (c.out.type == FLOAT16)
      for (Int i = 0; i < n * Ep; ++i)
        num[i] = std::min(std::max(num[i], -W(FLOAT16_MAX)), W(FLOAT16_MAX));
    write(Rows{c.out, b, head, chunk.t, n, E, Ep}, num);
  }
}

// S' = exp(G_C) S + sum_t exp(G_C - G_t) k_t v_t^T
template <class W>
void Task<W>::add_to_state(const Chunk& chunk) {
  if (decays) {
    scale_rows(chunk.size, Ep, until, v);
    scale(Mp * Ep, W(whole), S);
  }
  product(WHOLE, M, Ep, chunk.size, {rk, 1, Mp}, v, Ep, before ? S : nullptr, S, Ep, ahead);
  before = true;
}

// ---- Backward -----------------------------------------------------------------------------------

template <class W>
void Task<W>::backward(Int batch, Int key_head, Int s, Segments<W>& segments, bool light) {
  b = batch, h = key_head;
  const Int first = s * segments.blocks, last = std::min(blocks(), first + segments.blocks);
  const Int place = task() * segments.count + s;
  const bool ends = s + 1 == segments.count;
  double kept = 1;
  clear(after, dS, dz);
  if (!light) {
    const W* const from_S = ends ? state_at(c.dS) : &segments.S[place * M * E];
    const W* const from_z = ends ? state_at(c.dz) : &segments.z[place * M];
    for (Int i = 0; i < M; ++i) std::copy_n(from_S + i * E, E, dS + i * Ep);
    if (divides) std::copy_n(from_z, M, dz);
    after = !all_zero(Mp * Ep, dS) || !all_zero(Mp, dz);
  }
  for (Int block = last - 1; block >= first; --block) {
    cut(block);
    if (!light) states_again(block);
    for (Int i = Int(chunks.size()) - 1; i >= 0; --i) {
      const Chunk& chunk = chunks[i];
      tables(chunk);
      if (light) {
        if (decays) scale(Mp * Ep, W(whole), dS);
        for (Int head = h * group; head < (h + 1) * group; ++head) {
          features(c.q, head, chunk, fq, rq);
          load_gradient(head, chunk);
          if (divides) sum_gradient(chunk, head == h * group);
          add_to_state_gradient(chunk);
        }
        if (divides) pull_sum_gradient(chunk);
      } else {
        chunk_backward(i);
      }
      if (chunk.fresh) clear(after, dS, dz);
      kept *= chunk.fresh ? 0 : whole;
    }
  }
  if (light) segments.keep[place] = kept;
  if (light || !s) {
    W* const to_S = light ? &segments.S[(place - 1) * M * E] : state_at(c.dS0);
    for (Int i = 0; i < M; ++i) std::copy_n(dS + i * Ep, E, to_S + i * E);
    std::copy_n(dz, M, light ? &segments.z[(place - 1) * M] : state_at(c.dz0));
  }
}

// The states between the chunks of a block once more, transposed, as products need them.
template <class W>
void Task<W>::states_again(Int block) {
  Int used = 0, slot = -1;
  take_state(state_at(c.starts_S, block), state_at(c.starts_z, block));
  if (before) {
    slot = used++;
    transpose(Mp, Ep, S, Ep, states, Mp);
    std::copy_n(z, Mp, zs);
  }
  end_slot = -1;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    Chunk& chunk = chunks[i];
    if (chunk.fresh) {
      slot = -1;
      std::fill_n(z, Mp, W(0));
    }
    chunk.slot = slot;
    const bool last = i + 1 == chunks.size();
    if (last ? !c.dg.data : chunks[i + 1].fresh) continue;
    tables(chunk);
    keys(chunk);
    if (decays) scale_rows(chunk.size, Ep, until, v);
    const W* old = slot < 0 ? nullptr : states + slot * Mp * Ep;
    slot = used++;
    W* const next = states + slot * Mp * Ep;
    if (old && decays) {
      for (Int j = 0; j < Mp * Ep; ++j) next[j] = old[j] * W(whole);
      old = next;
    }
    ahead.start();
    soon(chunk.t + chunk.size, false, true);
    ahead.spread(E / ROWS);
    product(WHOLE, E, Mp, chunk.size, {v, 1, Ep}, rk, Mp, old, next, Mp, ahead);
    std::copy_n(z, Mp, zs + slot * Mp);
    if (last) end_slot = slot;
  }
}

// d_num = d_out / den and d_den = -(d_out . out) / den
template <class W>
void Task<W>::load_gradient(Int head, const Chunk& chunk) {
  const Int n = chunk.size;
  const bool clamped = c.out.type == FLOAT16;
  read(Rows{c.d_out, b, head, chunk.t, n, E, Ep}, d_num);
  if (divides || clamped) read(Rows{c.out, b, head, chunk.t, n, E, Ep}, num);
  if (clamped)
    for (Int i = 0; i < n * Ep; ++i) d_num[i] = std::abs(num[i]) < W(FLOAT16_MAX) ? d_num[i] : W(0);
  if (!divides) return;
  read(Rows{c.den, b, head, chunk.t, n, 1, 1}, d_den);
  for (Int i = 0; i < n; ++i) {
    const W den = d_den[i], by = divisor(den);
    const bool constant = turned ? std::abs(den) < W(ROTATED_FLOOR) : den == 0;
    d_den[i] = constant ? W(0) : -dot(Ep, d_num + i * Ep, num + i * Ep) / by;
    divide(Ep, by, d_num + i * Ep);
  }
}

// U_t: the gradient of the denominator's sum of keys at token t, of its own query only.
template <class W>
void Task<W>::sum_gradient(const Chunk& chunk, bool first_head) {
  const W* const f = below(fq, rq);
  for (Int i = 0; i < chunk.size; ++i)
    for (Int j = 0; j < Mp; j += Vec<W>::n) {
      const V<W> own = load(f + i * Mp + j) * d_den[i];
      store(U + i * Mp + j, first_head ? own : own + load(U + i * Mp + j));
    }
}

// U_t becomes the gradient of phi(k_t), from the queries behind it; dz goes to the chunk's start.
template <class W>
void Task<W>::pull_sum_gradient(const Chunk& chunk) {
  for (Int j = 0; j < Mp; j += Vec<W>::n) {
    const V<W> end = load(dz + j);
    V<W> sum{};
    for (Int t = chunk.size - 1; t >= 0; --t) {
      sum += load(U + t * Mp + j);
      store(U + t * Mp + j, sum + end * until[t]);
      sum *= step[t];
    }
    store(dz + j, sum + end * W(whole));
  }
}

// dS = exp(G_C) dS' + sum_t exp(G_t) q_t d_num_t^T; the first term is there already.
template <class W>
void Task<W>::add_to_state_gradient(const Chunk& chunk) {
  if (decays) scale_rows(chunk.size, Ep, since, d_num);
  product(WHOLE, M, Ep, chunk.size, {rq, 1, Mp}, d_num, Ep, after ? dS : nullptr, dS, Ep, ahead);
  after = true;
}

template <class W>
void Task<W>::chunk_backward(Int number) {
  const Chunk& chunk = chunks[number];
  const Int n = chunk.size, np = padded<W>(n);
  const W* const start = chunk.slot < 0 ? nullptr : states + chunk.slot * Mp * Ep;
  if (divides) {
    if (start)
      std::copy_n(zs + chunk.slot * Mp, Mp, z);
    else
      std::fill_n(z, Mp, W(0));
  }
  // 1. Keys and values again, and what comes from behind the chunk through the state.
  keys(chunk);
  transpose(np, Mp, rk, Mp, kt, Cp);
  transpose(np, Ep, v, Ep, vt, Cp);
  ahead.start();
  ahead.add(c.dq, b, h * group, chunk.t, n, M, true);
  ahead.add(c.dk, b, h, chunk.t, n, M, true);
  ahead.add(c.dv, b, h, chunk.t, n, E, true);
  soon(chunk.t - c.chunk, true, false);
  if (!number) soon(chunk.t - c.block, false, true);  // where the block before begins
  ahead.spread((8 * n + M) / ROWS);
  const bool behind = after;
  W through = 0;
  if (behind) {
    transpose(Mp, Ep, dS, Ep, dSt, Mp);
    product(WHOLE, n, Ep, M, {rk, Mp, 1}, dS, Ep, nullptr, dv, Ep, ahead);
    product(WHOLE, n, Mp, E, {v, Ep, 1}, dSt, Mp, nullptr, dk, Mp, ahead);
    if (decays) {
      scale_rows(n, Ep, until, dv);
      scale_rows(n, Mp, until, dk);
      const bool last = number + 1 == Int(chunks.size());
      const Int slot = last ? end_slot : chunks[number + 1].slot;
      if (c.dg.data && slot >= 0) {
        through = dot(E * Mp, states + slot * Mp * Ep, dSt);
        if (divides) through += dot(Mp, zs + slot * Mp, dz);
      }
      scale(Mp * Ep, W(whole), dS);
    }
  }
  std::fill_n(sums, Cp, W(0));
  for (Int head = h * group; head < (h + 1) * group; ++head) {
    const bool add = behind || head > h * group;
    features(c.q, head, chunk, fq, rq);
    load_gradient(head, chunk);
    if (divides) sum_gradient(chunk, head == h * group);
    // 2. The scores again, and their gradient.
    product(RESULT_BELOW, n, np, M, {rq, Mp, 1}, kt, Cp, nullptr, scores, Cp, ahead);
    mask(n, scores);
    product(RESULT_BELOW, n, np, E, {d_num, Ep, 1}, vt, Cp, nullptr, d_scores, Cp, ahead);
    mask(n, d_scores);
    // 3. Through them to values, keys and queries; the queries see the state before the chunk too.
    product(LEFT_ABOVE, n, Ep, n, {scores, 1, Cp}, d_num, Ep, add ? dv : nullptr, dv, Ep, ahead);
    product(LEFT_ABOVE, n, Mp, n, {d_scores, 1, Cp}, rq, Mp, add ? dk : nullptr, dk, Mp, ahead);
    if (start) {
      product(WHOLE, n, Mp, E, {d_num, Ep, 1}, start, Mp, nullptr, dq, Mp, ahead);
      if (decays) scale_rows(n, Mp, since, dq);
    }
    product(LEFT_BELOW, n, Mp, n, {d_scores, Cp, 1}, rk, Mp, start ? dq : nullptr, dq, Mp, ahead);
    finish(c.dq, head, chunk, fq, dq, Z, d_den, W(1));
    // 4. The gradient of the state before the chunk.
    add_to_state_gradient(chunk);
  }
  if (divides) pull_sum_gradient(chunk);
  finish(c.dk, h, chunk, fk, dk, U, nullptr, W(-1));
  write(Rows{c.dv, b, h, chunk.t, n, E, Ep}, dv);
  // 5. Log decay: the identity at the top of chunked.py.
  if (c.dg.data) {
    double sum = through;
    for (Int i = n - 1; i >= 0; --i) sums[i] = W(sum += sums[i]);
    if (chunk.fresh) sums[0] = 0;
    write(Rows{c.dg, b, h, chunk.t, n, 1, 1}, sums);
  }
}

// From the gradient d of rotated features to that of x: rotate back, add the denominator's part
// (rows of `extra`, times `factor`), times phi'(x), which the feature itself tells.
template <class W>
void Task<W>::finish(const Array& dx, Int head, const Chunk& chunk, const W* f, W* d,
                     const W* extra, const W* factor, W sign) {
  constexpr Int lanes = Vec<W>::n;
  const Int n = chunk.size;
  const auto add = [&] {
    for (Int t = 0; t < n; ++t)
      for (Int i = t * Mp; i < (t + 1) * Mp; i += lanes)
        store(d + i, load(d + i) + load(extra + i) * (factor ? factor[t] : W(1)));
  };
  if (divides && turned) add();
  if (rotates) rotate(n, d, true, d);
  if (divides && !turned) add();
  if (c.dg.data)
    for (Int t = 0; t < n; ++t) sums[t] += sign * dot(Mp, f + t * Mp, d + t * Mp);
  const V<W> zero{}, one = splat(W(1)), eps = splat(W(c.eps));
  const V<W> least = exponential<W>(splat(W(log_floor<W>))) * W(1.0001);  // and all that is flat
  if (c.phi == ELU_PLUS_ONE)
    for (Int i = 0; i < n * Mp; i += lanes) {
      const V<W> x = load(f + i), slope = x > one ? one : x;
      store(d + i, load(d + i) * (x <= least ? zero : slope));
    }
  else if (c.phi == RELU)
    for (Int i = 0; i < n * Mp; i += lanes) store(d + i, load(f + i) > eps ? load(d + i) : zero);
  write(Rows{dx, b, head, chunk.t, n, M, Mp}, d);
}

// ---- All tasks ----------------------------------------------------------------------------------

// x[s] for segments beyond the first, from what each adds and what it leaves of the one before.
template <class W>
void add_scaled(Int n, double factor, const W* from, W* to) {
  if (factor != 0)
    for (Int i = 0; i < n; ++i) to[i] += W(factor) * from[i];
}

template <class W>
void run(const Call& c, bool backward) {
  const Int tasks = c.batch * c.key_heads, blocks = (c.length + c.block - 1) / c.block;
  if (!tasks) return;
  Segments<W> parts;
  parts.blocks = std::max<Int>(blocks, 1);
  if (tasks < c.threads) {
    const Int many = std::min(std::max<Int>(blocks, 1), (c.threads + tasks - 1) / tasks);
    parts.blocks = std::max<Int>((blocks + many - 1) / many, 1);
  }
  parts.count = std::max<Int>((blocks + parts.blocks - 1) / parts.blocks, 1);
  const auto each = [&](bool light, Int from, Int count) {
    parallel(c.threads, tasks * count, [&](Int i) {
      Task<W> task(c, backward);
      const Int n = i / count, b = n / c.key_heads, h = n % c.key_heads, s = from + i % count;
      if (backward)
        task.backward(b, h, s, parts, light);
      else
        task.forward(b, h, s, parts, light);
    });
  };
  if (!backward) {
    prefer_large_pages(c.out, c.batch * c.heads * c.length * c.E);
  } else {
    prefer_large_pages(c.dq, c.batch * c.heads * c.length * c.M);
    prefer_large_pages(c.dk, tasks * c.length * c.M);
    prefer_large_pages(c.dv, tasks * c.length * c.E);
  }
  const Int last = parts.count - 1, SE = c.M * c.E;
  if (last) {
    parts.keep.resize(tasks * parts.count);
    if (backward) {
      parts.S.resize(tasks * parts.count * SE);
      parts.z.resize(tasks * parts.count * c.M);
    }
    each(true, backward ? 1 : 0, last);
    for (Int n = 0; n < tasks; ++n) {
      const double* keep = &parts.keep[n * parts.count];
      if (backward) {
        W *S = &parts.S[n * parts.count * SE], *z = &parts.z[n * parts.count * c.M];
        add_scaled(SE, keep[last], reinterpret_cast<W*>(c.dS.data) + n * SE, S + (last - 1) * SE);
        add_scaled(c.M, keep[last], reinterpret_cast<W*>(c.dz.data) + n * c.M,
                   z + (last - 1) * c.M);
        for (Int s = last - 1; s > 0; --s) {
          add_scaled(SE, keep[s], S + s * SE, S + (s - 1) * SE);
          add_scaled(c.M, keep[s], z + s * c.M, z + (s - 1) * c.M);
        }
      } else {
        const auto sweep = [&](const Array& starts, const Array& first, Int size) {
          const W* from = first.data ? reinterpret_cast<W*>(first.data) + n * size : nullptr;
          for (Int s = 1; s <= last; ++s) {
            W* const to = reinterpret_cast<W*>(starts.data) + (s * parts.blocks * tasks + n) * size;
            if (from) add_scaled(size, keep[s - 1], from, to);
            from = to;
          }
        };
        sweep(c.starts_S, c.S0, SE);
        sweep(c.starts_z, c.z0, c.M);
      }
    }
  }
  each(false, 0, parts.count);
}

// ---- One token: S' = exp(g) S + (R phi(k)) v^T, z' = exp(g) z + phi(k) ---------------------------

// A row of the batch: all its heads.
template <class W>
void step_row(const Step& c, Int b) {
  const Int M = c.M, E = c.E, Mp = padded<W>(M), Ep = padded<W>(E), group = c.heads / c.key_heads;
  const bool divides = c.denominator != NO_DENOMINATOR, turned = c.denominator == ROTATED;
  W* at = static_cast<W*>(arena().get(sizeof(W) * (7 * Mp + group * (Mp + Ep + 1))));
  const auto take = [&](Int size) { return std::exchange(at, at + size); };
  W *const cosine = take(Mp), *const sine = take(Mp), *const row = take(Mp), *const z = take(Mp);
  W *const fk = take(Mp), *const rk = take(Mp), *const fq = take(Mp), *const rq = take(group * Mp);
  W *const num = take(group * Ep), *const den = take(group);
  for (Int i = 0; i < c.pairs; ++i) {  // in float64, rounded once
    const double angle = double(c.position[b]) * c.theta[i];
    cosine[i] = W(c.multiplier * std::cos(angle));
    sine[i] = W(c.multiplier * std::sin(angle));
  }
  if (c.pairs) spread_tables(c.half, c.pairs, Mp, cosine, sine);
  const auto features = [&](const void* x, Int head, W* f, W* r) {
    std::copy_n(static_cast<const W*>(x) + head * M, M, f);
    map_features(c.phi, c.eps, Mp, f);
    std::fill(f + M, f + Mp, W(0));
    if (c.pairs)
      turn(c.half, c.pairs, Mp, cosine, sine, W(1), f, row, r);
    else
      std::copy_n(f, Mp, r);
  };
  for (Int h = 0; h < c.key_heads; ++h) {
    const Int key = b * c.key_heads + h, query = key * group;
    const W keep = c.g ? std::exp(static_cast<const W*>(c.g)[key]) : W(1);
    features(c.k, key, fk, rk);
    std::fill_n(z, Mp, W(0));
    if (divides) {
      const W *const z0 = static_cast<const W*>(c.z0) + key * M, *const f = turned ? rk : fk;
      for (Int i = 0; i < M; ++i) z[i] = keep * z0[i] + f[i];
    }
    std::copy_n(z, M, static_cast<W*>(c.z) + key * M);
    for (Int n = 0; n < group; ++n) {
      features(c.q, query + n, fq, rq + n * Mp);
      if (divides) den[n] = divisor_of(dot(Mp, turned ? rq + n * Mp : fq, z), turned);
    }
    std::fill_n(num, group * Ep, W(0));
    const W* const v = static_cast<const W*>(c.v) + key * E;
    for (Int m = 0; m < M; ++m) {
      const W* __restrict__ const S0 = static_cast<const W*>(c.S0) + (key * M + m) * E;
      W* __restrict__ const S = static_cast<W*>(c.S) + (key * M + m) * E;
      for (Int e = 0; e < E; ++e) S[e] = keep * S0[e] + rk[m] * v[e];
      for (Int n = 0; n < group; ++n) {
        const W weight = rq[n * Mp + m];
        W* __restrict__ const sum = num + n * Ep;
        for (Int e = 0; e < E; ++e) sum[e] += weight * S[e];
      }
    }
    for (Int n = 0; n < group; ++n) {
      if (divides) divide(Ep, den[n], num + n * Ep);
      std::copy_n(num + n * Ep, E, static_cast<W*>(c.out) + (query + n) * E);
    }
  }
  c.next[b] = c.position[b] + 1;
}

template <class W>
void run(const Step& c) {
  const bool large = c.batch * c.heads * c.M * c.E > Int(1) << 18;
  parallel(large ? c.threads : 1, c.batch, [&](Int b) { step_row<W>(c, b); });
}

}  // namespace LINEAR_ROPE_LEVEL
}  // namespace

#include "native_block.h"

#endif
