// One token through whole blocks of a model, around the step of native.cpp: norm, projections,
// attention, output projection, feed-forward layer. For a few rows, where the products only read
// the weights once and a call for each operation would take longer than the operations.
//
// Included by native.cpp, in its first part for what is shared and in its second part, once for
// each instruction set, for the kernels.

#ifndef LINEAR_ROPE_BYTES

namespace {

// y = W x + b: (rows x columns), dense, and b or null. Absent if W is null.
struct Affine {
  const void *weight, *bias;
};

// The same in native_block.py, in the same order. Fields of `step` that are addresses of q, k, v, g
// and out are set here.
struct BlockStep {
  Step step;
  Int dim, hidden;
  Int rms;          // norms without a mean
  Int output_norm;  // a head's output over its root mean square
  double norm_eps, mlp_norm_eps, head_eps;
  const void* rates;  // log decays of fixed rates, one a key head, or null
  Affine norm, query, key, value, decay, gate, out, query_norm, key_norm;
  Affine mlp_norm, up, mlp_gate, down;
  void* x;  // (batch, dim), in place
};

// What is done to a row's product: y, silu(y), gelu(y), log sigmoid(y), silu(y) times the product
// with a second matrix, or added to what is there.
enum After : Int { NOTHING, SILU, GELU, LOG_SIGMOID, GATES, ADD };

Arena& block_arena() {  // the step inside has the other one
  static thread_local Arena mine;
  return mine;
}

// Products below this many multiplications cost less than to wake a second thread.
const Int ALONE = Int(1) << 16;

}  // namespace

#else

namespace {
namespace LINEAR_ROPE_LEVEL {

// (a . b) for the first n columns; b may be at any address too.
template <class W>
ALWAYS W product(Int n, const W* a, const W* b) {
  constexpr Int w = Vec<W>::n;
  V<W> s0{}, s1{}, s2{}, s3{};
  Int i = 0;
  for (; i + 4 * w <= n; i += 4 * w) {
    s0 += load(a + i) * load(b + i);
    s1 += load(a + i + w) * load(b + i + w);
    s2 += load(a + i + 2 * w) * load(b + i + 2 * w);
    s3 += load(a + i + 3 * w) * load(b + i + 3 * w);
  }
  for (; i + w <= n; i += w) s0 += load(a + i) * load(b + i);
  W sum = total<W>((s0 + s1) + (s2 + s3));
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

template <class W>
ALWAYS W silu(W x) {
  return x / (W(1) + std::exp(-x));
}

// `rows` outputs for each of the batch's inputs.
template <class W>
struct Job {
  Affine by;
  Int rows, columns;
  const W* x;
  W* y;
  After after;
  Affine gate;

  void row(Int r, Int batch) const {
    const W* const weight = static_cast<const W*>(by.weight) + r * columns;
    const W bias = by.bias ? static_cast<const W*>(by.bias)[r] : W(0);
    for (Int b = 0; b < batch; ++b) {
      W* const to = y + b * rows + r;
      const W* const from = x + b * columns;
      const W value = product(columns, weight, from) + bias;
      switch (after) {
        case NOTHING: *to = value; break;
        case SILU: *to = silu(value); break;
        case GELU: *to = value * W(0.5) * (W(1) + std::erf(value * W(0.70710678118654752440))); break;
        case LOG_SIGMOID:
          *to = std::min(value, W(0)) - std::log1p(std::exp(-std::abs(value)));
          break;
        case GATES: {
          const W other = product(columns, static_cast<const W*>(gate.weight) + r * columns, from);
          *to = value * silu(other + (gate.bias ? static_cast<const W*>(gate.bias)[r] : W(0)));
          break;
        }
        case ADD: *to += value; break;
      }
    }
  }
};

// Jobs that do not wait for each other, a few rows a task.
template <class W>
void work(Int threads, Int batch, std::initializer_list<Job<W>> jobs) {
  constexpr Int few = 16;
  Int tasks = 0, size = 0;
  for (const Job<W>& job : jobs) {
    if (!job.by.weight) continue;
    tasks += (job.rows + few - 1) / few;
    size += job.rows * job.columns * batch;
  }
  parallel(size < ALONE ? 1 : threads, tasks, [&](Int task) {
    for (const Job<W>& job : jobs) {
      if (!job.by.weight) continue;
      const Int own = (job.rows + few - 1) / few;
      if (task < own) {
        for (Int r = task * few; r < std::min(job.rows, (task + 1) * few); ++r) job.row(r, batch);
        return;
      }
      task -= own;
    }
  });
}

// LayerNorm, or RMSNorm; weight and bias may be null. y may be x.
template <class W>
void normalize(Int rows, Int n, bool rms, double eps, const Affine& by, const W* x, W* y) {
  const W *const weight = static_cast<const W*>(by.weight), *const bias =
      static_cast<const W*>(by.bias);
  for (Int r = 0; r < rows; ++r, x += n, y += n) {
    double mean = 0, square = 0;
    if (!rms) {
      for (Int i = 0; i < n; ++i) mean += x[i];
      mean /= double(n);
    }
    for (Int i = 0; i < n; ++i) square += (x[i] - mean) * (x[i] - mean);
    const double by_root = 1 / std::sqrt(square / double(n) + eps);
    for (Int i = 0; i < n; ++i) {
      W value = W((x[i] - mean) * by_root);
      if (weight) value *= weight[i];
      y[i] = bias ? value + bias[i] : value;
    }
  }
}

template <class W>
void run(const BlockStep& c) {
  Step step = c.step;
  const Int B = step.batch, D = c.dim, queries = step.heads * step.M, keys = step.key_heads * step.M;
  const Int values = step.key_heads * step.E, merged = step.heads * step.E;
  const Int all = B * (D + queries + keys + values + step.key_heads + 2 * merged + c.hidden);
  W* at = static_cast<W*>(block_arena().get(sizeof(W) * all));
  const auto take = [&](Int size) { return std::exchange(at, at + B * size); };
  W *const normed = take(D), *const q = take(queries), *const k = take(keys);
  W *const v = take(values), *const g = take(step.key_heads), *const gate = take(merged);
  W *const out = take(merged), *const inner = take(c.hidden), *const x = static_cast<W*>(c.x);
  const auto job = [](const Affine& by, Int rows, Int columns, const W* from, W* to,
                      After after = NOTHING, Affine second = Affine{nullptr, nullptr}) {
    return Job<W>{by, rows, columns, from, to, after, second};
  };

  normalize(B, D, c.rms != 0, c.norm_eps, c.norm, x, normed);
  work(step.threads, B,
       {job(c.query, queries, D, normed, q), job(c.key, keys, D, normed, k),
        job(c.value, values, D, normed, v),
        job(c.decay, step.key_heads, D, normed, g, LOG_SIGMOID),
        job(c.gate, merged, D, normed, gate, SILU)});
  if (c.query_norm.weight) {
    normalize(B * step.heads, step.M, true, c.head_eps, c.query_norm, q, q);
    normalize(B * step.key_heads, step.M, true, c.head_eps, c.key_norm, k, k);
  }
  step.q = q, step.k = k, step.v = v, step.out = out;
  if (c.rates)
    for (Int b = 0; b < B; ++b)
      std::copy_n(static_cast<const W*>(c.rates), step.key_heads, g + b * step.key_heads);
  step.g = c.rates || c.decay.weight ? g : nullptr;
  run<W>(step);
  if (c.output_norm)
    normalize(B * step.heads, step.E, true, c.head_eps, Affine{nullptr, nullptr}, out, out);
  if (c.gate.weight)
    for (Int i = 0; i < B * merged; ++i) out[i] *= gate[i];
  work(step.threads, B, {job(c.out, D, merged, out, x, ADD)});

  normalize(B, D, c.rms != 0, c.mlp_norm_eps, c.mlp_norm, x, normed);
  work(step.threads, B,
       {job(c.up, c.hidden, D, normed, inner, c.mlp_gate.weight ? GATES : GELU, c.mlp_gate)});
  work(step.threads, B, {job(c.down, D, c.hidden, inner, x, ADD)});
}

}  // namespace LINEAR_ROPE_LEVEL
}  // namespace

#endif
