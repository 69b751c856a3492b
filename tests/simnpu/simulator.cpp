// Simulated NPU: a PrivateUse1 backend living in host memory, for CI on CPU only.
// Every op runs eagerly on the CPU kernel over the same bytes; streams are modelled by vector clocks, so a
// missing wait/record_stream/sync is reported as a hazard although the numbers come out right.
#include <torch/extension.h>
#include <torch/library.h>
#include <ATen/autocast_mode.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <map>
#include <mutex>
#include <set>
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::IValue;
constexpr auto PU1 = DeviceType::PrivateUse1;
namespace sim {
// ------------------------------------------------------------------ state: clocks, counters, hazards
using VC = std::map<int64_t, uint64_t>;  // key: stream gid (device*1000+id)
std::recursive_mutex mu;
VC host;
std::map<int64_t, VC> streams;
std::map<std::string, int64_t> syncs, launches, fallbacks;
std::vector<std::string> hazards;
std::set<std::string> native_ops;
std::set<void*> pinned;
int n_dev = 2;
int64_t mem_now[16], mem_peak[16];
bool defer = true;
bool saturating = false;   // as the Atlas training series computes: no Inf, no NaN, a flag instead
bool overflowed[16] = {};  // the flag of each device
thread_local DeviceIndex cur_dev = 0;
thread_local int64_t cur_stream[16] = {0};
constexpr int64_t COMM = 900;
inline int64_t gid(DeviceIndex d, int64_t s) {
  return d * 1000 + s;
}
inline int64_t cur() {
  return gid(cur_dev, cur_stream[cur_dev]);
}
void merge(VC& a, const VC& b) {
  for (auto& [k, v] : b) {
    auto& x = a[k];
    if (x < v) x = v;
  }
}
uint64_t at_(const VC& v, int64_t k) {
  auto i = v.find(k);
  return i == v.end() ? 0 : i->second;
}
void hazard(const std::string& s) {
  if (hazards.size() < 1000) hazards.push_back(s);
}
struct Pending {
  int64_t s;
  uint64_t clk;
  Tensor src, dst;
  uint64_t hash;
  bool h2d;
};
std::vector<Pending> pend;
uint64_t fnv(const void* p, size_t n) {
  uint64_t h = 1469598103934665603ull;
  auto c = (const unsigned char*)p;
  for (size_t i = 0; i < n; i++) h = (h ^ c[i]) * 1099511628211ull;
  return h;
}
void flush(const VC& upto) {  // deferred async copies now visible to the host
  std::vector<Pending> keep, go;
  for (auto& p : pend) (at_(upto, p.s) >= p.clk ? go : keep).push_back(p);
  pend.swap(keep);
  for (auto& p : go) {
    if (p.h2d) {
      if (fnv(p.src.data_ptr(), p.src.nbytes()) != p.hash)
        hazard("pinned source modified before async H2D copy was synchronized");
    } else {
      at::AutoDispatchBelowADInplaceOrView g;
      p.dst.copy_(p.src);
    }
  }
}
void host_join(const VC& v, const std::string& why) {
  std::lock_guard<std::recursive_mutex> l(mu);
  if (!why.empty()) syncs[why]++;
  merge(host, v);
  flush(host);
}
uint64_t tick(int64_t s) {
  auto& v = streams[s];
  merge(v, host);
  return ++v[s];
}
// ------------------------------------------------------------------ device memory
struct Block {
  void* p;
  size_t n;
  DeviceIndex d;
  int64_t s;
  int64_t ws = -1;
  uint64_t wc = 0;
  std::map<int64_t, uint64_t> reads;
  std::set<int64_t> rec;
  int format = 2;  // ND; others are the device's own and have their numbers in another order
};
void del(void* c) {
  auto b = (Block*)c;
  std::lock_guard<std::recursive_mutex> l(mu);
  mem_now[b->d] -= b->n;
  auto uses = b->reads;
  if (b->ws >= 0) uses[b->ws] = std::max(uses[b->ws], b->wc);
  for (auto& [s, k] : uses)
    if (s != b->s && !b->rec.count(s) && at_(streams[b->s], s) < k && at_(host, s) < k)
      hazard("block freed while stream " + std::to_string(s) +
             " may still use it (no record_stream, alloc stream " + std::to_string(b->s) + ")");
  free(b->p);
  delete b;
}
struct Alloc final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    std::lock_guard<std::recursive_mutex> l(mu);
    auto b = new Block{n ? aligned_alloc(64, (n + 63) / 64 * 64) : nullptr, n, cur_dev, cur()};
    if (n) memset(b->p, 0xff, n);  // NaN poison: reading uninitialised memory shows
    mem_now[cur_dev] += n;
    mem_peak[cur_dev] = std::max(mem_peak[cur_dev], mem_now[cur_dev]);
    return {b->p, b, &del, Device(PU1, cur_dev)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* d, const void* s, std::size_t n) const override { memcpy(d, s, n); }
} alloc;
REGISTER_ALLOCATOR(PU1, &alloc);
struct PinAlloc final : c10::Allocator {
  static void pdel(void* p) {
    std::lock_guard<std::recursive_mutex> l(mu);
    pinned.erase(p);
    free(p);
  }
  c10::DataPtr allocate(size_t n) override {
    std::lock_guard<std::recursive_mutex> l(mu);
    void* p = aligned_alloc(64, (n + 64) / 64 * 64);
    pinned.insert(p);
    return {p, p, &pdel, Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &pdel; }
  void copy_data(void* d, const void* s, std::size_t n) const override { memcpy(d, s, n); }
} pin_alloc;
Block* block_of(const Tensor& t) {
  auto& dp = t.storage().data_ptr();
  return dp.get_deleter() == &del ? (Block*)dp.get_context() : nullptr;
}
void touch(const Tensor& t, int64_t s, bool w, const std::string& op) {
  auto b = block_of(t);
  if (!b) return;
  auto& v = streams[s];
  if (b->ws >= 0 && b->ws != s && at_(v, b->ws) < b->wc)
    hazard(op + (w ? ": write" : ": read") + " on stream " + std::to_string(s) +
           " not ordered after write on stream " + std::to_string(b->ws));
  if (w) {
    for (auto& [r, k] : b->reads)
      if (r != s && at_(v, r) < k)
        hazard(op + ": write on stream " + std::to_string(s) + " not ordered after read on stream " +
               std::to_string(r));
    b->reads.clear();
    b->ws = s;
    b->wc = v[s];
  } else
    b->reads[s] = v[s];
}
// ------------------------------------------------------------------ RNG
struct Gen final : c10::GeneratorImpl {
  at::Generator in;
  Gen(DeviceIndex d, uint64_t seed = 5489)
      : c10::GeneratorImpl(Device(PU1, d), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        in(at::detail::createCPUGenerator(seed)) {}
  void set_current_seed(uint64_t s) override { in.set_current_seed(s); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return in.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(in).seed(); }
  void set_state(const c10::TensorImpl& s) override { in.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return in.unsafeGetGeneratorImpl()->get_state();
  }
  Gen* clone_impl() const override {
    auto g = new Gen(device().index());
    g->in = in.clone();
    return g;
  }
};
const at::Generator& def_gen(DeviceIndex d) {
  static std::vector<at::Generator> g = [] {
    std::vector<at::Generator> r;
    for (int i = 0; i < 16; i++) r.push_back(at::make_generator<Gen>(i));
    return r;
  }();
  return g.at(d < 0 ? cur_dev : d);
}
// ------------------------------------------------------------------ alias device tensor as CPU tensor (same
// bytes)
struct Ctx {
  std::map<c10::StorageImpl*, c10::Storage> m;
  std::vector<std::pair<Tensor, Tensor>> pairs;
  DeviceIndex d = -1;
  Tensor cpu(const Tensor& t) {
    if (!t.defined() || t.device().type() != PU1) return t;
    if (d < 0) d = t.device().index();
    auto s = t.storage().unsafeGetStorageImpl();
    auto i = m.find(s);
    if (i == m.end())
      i = m.emplace(s, c10::Storage(c10::make_intrusive<c10::StorageImpl>(
                           c10::StorageImpl::use_byte_size_t(), s->nbytes(),
                           c10::DataPtr(s->mutable_data(), Device(at::kCPU)), c10::GetCPUAllocator(), true)))
              .first;
    Tensor r = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(i->second), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    auto p = r.unsafeGetTensorImpl();
    p->set_storage_offset(t.storage_offset());
    p->set_sizes_and_strides(t.sizes(), t.strides());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) p->set_wrapped_number(true);
    if (t.is_conj()) r._set_conj(true);
    if (t.is_neg()) r._set_neg(true);
    pairs.emplace_back(t, r);
    return r;
  }
  Tensor npu(const Tensor& c) {
    if (!c.defined()) return c;
    for (auto& [n, k] : pairs)
      if (k.is_same(c)) return n;
    c10::Storage st;
    for (auto& [s, k] : m)
      if (k.unsafeGetStorageImpl() == c.storage().unsafeGetStorageImpl())
        st = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(s));
    bool fresh = !st;
    if (fresh) {
      auto dp = alloc.allocate(c.storage().nbytes());
      if (c.storage().nbytes()) memcpy(dp.get(), c.storage().data(), c.storage().nbytes());
      st = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), c.storage().nbytes(), std::move(dp), &alloc, true));
    }
    Tensor r = at::detail::make_tensor<c10::TensorImpl>(
        std::move(st), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c.dtype());
    auto p = r.unsafeGetTensorImpl();
    p->set_storage_offset(c.storage_offset());
    p->set_sizes_and_strides(c.sizes(), c.strides());
    if (c.is_conj()) r._set_conj(true);
    if (c.is_neg()) r._set_neg(true);
    return r;
  }
  void writeback() {  // out= / resize_ may have regrown an alias
    for (auto& [s, k] : m)
      if (k.data() != s->data()) {
        auto dp = alloc.allocate(k.nbytes());
        memcpy(dp.get(), k.data(), k.nbytes());
        s->set_data_ptr_noswap(std::move(dp));
        s->set_nbytes(k.nbytes());
      }
    for (auto& [n, c] : pairs)
      if (n.sizes() != c.sizes() || n.strides() != c.strides()) {
        n.unsafeGetTensorImpl()->set_sizes_and_strides(c.sizes(), c.strides());
        n.unsafeGetTensorImpl()->set_storage_offset(c.storage_offset());
      }
  }
};
const std::set<std::string> SYNC_OPS{"aten::nonzero",
                                     "aten::masked_select",
                                     "aten::_unique2",
                                     "aten::unique_dim",
                                     "aten::unique_consecutive",
                                     "aten::equal",
                                     "aten::repeat_interleave.Tensor",
                                     "aten::_is_any_true",
                                     "aten::_is_all_true",
                                     "aten::bincount"};
// ------------------------------------------------------------------ saturation
bool finite(const Tensor& c) {
  return !c.defined() || !c.is_floating_point() || !c.numel() || at::isfinite(c).all().item<bool>();
}
bool saturate(const Tensor& c) {  // what an overflow comes out as: +-MAX, and NaN as 0
  if (finite(c)) return false;
  at::nan_to_num_(const_cast<Tensor&>(c), 0.0);
  return true;
}
// How many kernels an operator on a list of tensors is: one takes up to 24 of them, and a norm of another
// order than 1 and 2 has none for lists.
constexpr size_t CHUNK = 24;
void count_launches(const std::string& name, const torch::jit::Stack& st, size_t base, size_t n) {
  if (name.rfind("aten::_foreach_", 0) != 0 || n == 0 || !st[base].isTensorList()) {
    launches[name]++;
    return;
  }
  size_t size = st[base].toTensorList().size();
  if (name == "aten::_foreach_norm.Scalar" && n > 1 && st[base + 1].isScalar()) {
    double order = st[base + 1].toScalar().toDouble();
    if (order != 1 && order != 2) {
      launches["aten::linalg_vector_norm"] += size;
      return;
    }
  }
  launches[name] += std::max<size_t>(1, (size + CHUNK - 1) / CHUNK);
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* st) {
  auto& sch = op.schema();
  auto name = sch.name() + (sch.overload_name().empty() ? "" : "." + sch.overload_name());
  size_t n = sch.arguments().size(), base = st->size() - n;
  Ctx cx;
  std::vector<std::pair<Tensor, bool>> acc;
  bool cpu_big = false;
  auto one = [&](const Tensor& t, bool w) {
    if (t.defined()) {
      if (t.device().type() == PU1)
        acc.emplace_back(t, w);
      else if (t.dim() > 0)
        cpu_big = true;
    }
    return cx.cpu(t);
  };
  for (size_t i = 0; i < n; i++) {
    IValue& v = (*st)[base + i];
    auto* al = sch.arguments()[i].alias_info();
    bool w = al && al->isWrite();
    if (v.isTensor())
      v = one(v.toTensor(), w);
    else if (v.isTensorList()) {
      c10::List<Tensor> l;
      for (const Tensor& t : v.toTensorVector()) l.push_back(one(t, w));
      v = l;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> l;
      for (const auto& t : v.toOptionalTensorList()) {
        std::optional<Tensor> o = t;
        l.push_back(o ? std::optional<Tensor>(one(*o, w)) : std::nullopt);
      }
      v = l;
    } else if (v.isDevice() && v.toDevice().type() == PU1) {
      if (cx.d < 0) cx.d = v.toDevice().index() < 0 ? cur_dev : v.toDevice().index();
      v = Device(at::kCPU);
    }
  }
  if (cx.d < 0) cx.d = cur_dev;
  TORCH_CHECK(
      acc.empty() || !cpu_big || name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0,
      name, ": Expected all tensors to be on the same device, but found npu:", int(cx.d), " and cpu");
  for (auto& a : acc)
    TORCH_CHECK(a.first.device().index() == cx.d, name, ": tensors on different npu devices");
  for (size_t i = 0; i < n; i++)
    if (sch.arguments()[i].type()->str() == "Generator?") {
      IValue& v = (*st)[base + i];
      v = v.isNone() ? static_cast<Gen*>(def_gen(cx.d).unsafeGetGeneratorImpl())->in
                     : static_cast<Gen*>(v.toGenerator().unsafeGetGeneratorImpl())->in;
    }
  std::lock_guard<std::recursive_mutex> l(mu);
  auto od = cur_dev;
  cur_dev = cx.d;
  auto s = cur();
  bool view = !sch.returns().empty();
  for (auto& r : sch.returns())
    if (!(r.alias_info() && !r.alias_info()->isWrite())) view = false;
  bool inputs_finite = true;
  if (saturating && !view)
    for (size_t i = 0; i < n; i++) {  // an infinity that was given is no overflow
      const IValue& v = (*st)[base + i];
      if (sch.arguments()[i].kwarg_only() && sch.arguments()[i].alias_info()) continue;  // out=
      if (v.isTensor()) inputs_finite = inputs_finite && finite(v.toTensor());
      if (v.isTensorList())
        for (const Tensor& t : v.toTensorVector()) inputs_finite = inputs_finite && finite(t);
      if (v.isDouble()) inputs_finite = inputs_finite && std::isfinite(v.toDouble());
    }
  if (saturating && name == "aten::_amp_foreach_non_finite_check_and_unscale_") {
    // There it reads the flag, and clears it: the host waits, and scaled gradients stay as they are.
    auto list = (*st)[base].toTensorVector();
    auto found = (*st)[base + 1].toTensor(), scale = (*st)[base + 2].toTensor();
    tick(s);
    for (auto& a : acc) touch(a.first, s, a.second, name);
    host_join(streams[s], "item");
    at::AutoDispatchBelowADInplaceOrView g;
    launches["aten::mul_.Tensor"] += overflowed[cx.d] ? 0 : list.size();
    if (overflowed[cx.d])
      found.add_(1);
    else
      for (auto& t : list) t.mul_(scale);
    overflowed[cx.d] = false;
    torch::jit::drop(*st, n);
    cur_dev = od;
    return;
  }
  if (!view) {
    tick(s);
    count_launches(name, *st, base, n);
    if (!native_ops.empty() && !native_ops.count(sch.name())) fallbacks[name]++;
    for (auto& a : acc) touch(a.first, s, a.second, name);
  }
  {
    at::AutoDispatchBelowADInplaceOrView g;
    c10::impl::ExcludeDispatchKeyGuard g2(c10::autocast_dispatch_keyset);
    try {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), st);
    } catch (...) {
      cur_dev = od;
      throw;
    }
  }
  cx.writeback();
  if (saturating && !view) {
    at::AutoDispatchBelowADInplaceOrView g;
    c10::impl::ExcludeDispatchKeyGuard g2(c10::autocast_dispatch_keyset);
    bool any = false;
    for (size_t i = 0, r = sch.returns().size(), b = st->size() - r; i < r; i++) {
      IValue& v = (*st)[b + i];
      if (v.isTensor()) any |= saturate(v.toTensor());
      if (v.isTensorList())
        for (const Tensor& t : v.toTensorVector()) any |= saturate(t);
    }
    for (size_t i = 0; i < acc.size(); i++)  // written in place, by an operator that returns nothing
      if (acc[i].second) any |= saturate(cx.cpu(acc[i].first));
    if (any && inputs_finite) overflowed[cx.d] = true;
  }
  for (size_t i = 0, r = sch.returns().size(), b = st->size() - r; i < r; i++) {
    IValue& v = (*st)[b + i];
    auto ret = [&](const Tensor& t) {
      Tensor o = cx.npu(t);
      if (!view && o.defined()) touch(o, s, true, name);
      return o;
    };
    if (v.isTensor())
      v = ret(v.toTensor());
    else if (v.isTensorList()) {
      c10::List<Tensor> o;
      for (const Tensor& t : v.toTensorVector()) o.push_back(ret(t));
      v = o;
    }
  }
  if (SYNC_OPS.count(name)) host_join(streams[s], name);
  cur_dev = od;
}
// ------------------------------------------------------------------ explicit kernels
struct DevG {
  DeviceIndex o = cur_dev;
  DevG(DeviceIndex d) {
    if (d >= 0) cur_dev = d;
  }
  ~DevG() { cur_dev = o; }
};
using OST = std::optional<at::ScalarType>;
using OL = std::optional<at::Layout>;
using OD = std::optional<Device>;
using OB = std::optional<bool>;
using OM = std::optional<at::MemoryFormat>;
constexpr c10::DispatchKeySet KS(c10::DispatchKey::PrivateUse1);
Tensor empty_mf(at::IntArrayRef sz, OST t, OL, OD d, OB, OM m) {
  DevG g(d ? d->index() : -1);
  return at::detail::empty_generic(sz, &alloc, KS,
                                   t.value_or(at::typeMetaToScalarType(at::get_default_dtype())), m);
}
Tensor empty_st(at::IntArrayRef sz, at::IntArrayRef st, OST t, OL, OD d, OB) {
  DevG g(d ? d->index() : -1);
  return at::detail::empty_strided_generic(sz, st, &alloc, KS,
                                           t.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}
bool is_pinned(const Tensor& t) {
  std::lock_guard<std::recursive_mutex> l(mu);
  return t.device().is_cpu() && t.storage().data() && pinned.count(const_cast<void*>(t.storage().data()));
}
Tensor copy_from(const Tensor& a, const Tensor& b, bool nb) {
  std::lock_guard<std::recursive_mutex> l(mu);
  bool an = a.device().type() == PU1, bn = b.device().type() == PU1;
  DevG g(an ? a.device().index() : b.device().index());
  auto s = cur();
  auto clk = tick(s);
  launches[an && bn ? "copy_d2d" : an ? "copy_d2h" : "copy_h2d"]++;
  if (an) touch(a, s, false, "copy_");
  if (bn) touch(b, s, true, "copy_");
  Ctx cx;
  Tensor ca = cx.cpu(a), cb = cx.cpu(b);
  at::AutoDispatchBelowADInplaceOrView gg;
  if (an && !bn && nb && is_pinned(b) && defer) {
    Tensor tmp = at::empty_like(cb);
    tmp.copy_(ca);
    if (b.is_contiguous() && b.nbytes())
      memset(b.mutable_data_ptr(), 0xff, b.nbytes());  // poison until synchronized
    pend.push_back({s, clk, tmp, b, 0, false});
    return b;
  }
  cb.copy_(ca);
  if (saturating && an && bn && a.scalar_type() != b.scalar_type())  // a cast computes, a copy does not
    if (saturate(cb) && finite(ca)) overflowed[cur_dev] = true;
  if (!an && nb && is_pinned(a) && a.is_contiguous())
    pend.push_back({s, clk, a, b, fnv(a.data_ptr(), a.nbytes()), true});
  else if (!(an && bn))
    host_join(streams[s], an ? "blocking_d2h" : "blocking_h2d");
  return b;
}
Tensor copy_from_resize(const Tensor& a, const Tensor& b) {
  b.resize_(a.sizes());
  return copy_from(a, b, false);
}
at::Scalar lsd(const Tensor& t) {
  std::lock_guard<std::recursive_mutex> l(mu);
  DevG g(t.device().index());
  auto s = cur();
  tick(s);
  touch(t, s, false, "item");
  host_join(streams[s], "item");
  Ctx c;
  at::AutoDispatchBelowADInplaceOrView gg;
  return at::_local_scalar_dense(c.cpu(t));
}
Tensor& set_sso(Tensor& r, at::Storage s, int64_t off, at::IntArrayRef sz, at::IntArrayRef st) {
  auto p = r.unsafeGetTensorImpl();
  p->set_storage_offset(off);
  p->set_storage_keep_dtype(std::move(s));
  p->set_sizes_and_strides(sz, st.empty() && !sz.empty() ? at::IntArrayRef(c10::contiguous_strides(sz)) : st);
  return r;
}
Tensor& set_s(Tensor& r, at::Storage s) {
  int64_t n = s.nbytes() / r.dtype().itemsize();
  return set_sso(r, std::move(s), 0, {n}, {1});
}
Tensor& set_t(Tensor& r, const Tensor& t) {
  return set_sso(r, t.storage(), t.storage_offset(), t.sizes(), t.strides());
}
Tensor& set_0(Tensor& r) {
  DevG g(r.device().index());
  auto dp = alloc.allocate(0);
  return set_sso(r,
                 c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                                    std::move(dp), &alloc, true)),
                 0, {0}, {1});
}
Tensor view_dtype(const Tensor& t, at::ScalarType dtype) {
  std::lock_guard<std::recursive_mutex> l(mu);
  auto b = block_of(t);
  if (b && b->format != 0 && b->format != 2) hazard("bits looked at in the device's own format");
  return at::native::view_dtype(t, dtype);
}
void grow(c10::StorageImpl* s, size_t nb) {
  if (s->nbytes() >= nb) return;
  DevG g(s->device().index());
  auto dp = alloc.allocate(nb);
  if (s->nbytes()) memcpy(dp.get(), s->data(), s->nbytes());
  s->set_data_ptr_noswap(std::move(dp));
  s->set_nbytes(nb);
}
const Tensor& resize_(const Tensor& t, at::IntArrayRef sz, OM) {
  auto p = t.unsafeGetTensorImpl();
  p->set_sizes_contiguous(sz);
  grow(t.storage().unsafeGetStorageImpl(), (t.storage_offset() + t.numel()) * t.itemsize());
  return t;
}
void record_stream(Tensor& t, c10::Stream s) {
  std::lock_guard<std::recursive_mutex> l(mu);
  if (auto b = block_of(t)) b->rec.insert(gid(s.device_index(), s.id()));
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_mf);
  m.impl("empty_strided", empty_st);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_resize);
  m.impl("_local_scalar_dense", lsd);
  m.impl("set_.source_Storage_storage_offset", set_sso);
  m.impl("set_.source_Storage", set_s);
  m.impl("set_.source_Tensor", set_t);
  m.impl("set_", set_0);
  m.impl("resize_", resize_);
  m.impl("view.dtype", view_dtype);
  m.impl("record_stream", record_stream);
}
void register_native(const std::vector<std::string>& ops) {
  static torch::Library lib(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (auto& o : ops) lib.impl(o.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
// ------------------------------------------------------------------ autocast
namespace ac {
using namespace at;
using namespace at::autocast;
#define K_LP(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define K_32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define K_SD(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define K_PR(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(K_LP)
  AT_FORALL_FP32(K_32) AT_FORALL_FP32_SET_OPT_DTYPE(K_SD) AT_FORALL_PROMOTE(K_PR)
      AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
}
}  // namespace ac
// ------------------------------------------------------------------ device guard (devices, streams, events)
struct Ev {
  VC vc;
  bool rec = false;
  int polls = 0;
  double t = 0;
};
double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}
int64_t g_pool = 0;
struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return PU1; }
  static void chk(DeviceIndex d) { TORCH_CHECK(d >= 0 && d < n_dev, "invalid npu device ordinal ", int(d)); }
  Device exchangeDevice(Device d) const override {
    auto o = cur_dev;
    setDevice(d);
    return Device(PU1, o);
  }
  Device getDevice() const override { return Device(PU1, cur_dev); }
  void setDevice(Device d) const override {
    if (d.index() >= 0) {
      chk(d.index());
      cur_dev = d.index();
    }
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) cur_dev = d.index();
  }
  DeviceIndex ix(Device d) const { return d.index() < 0 ? cur_dev : d.index(); }
  c10::Stream mk(DeviceIndex d, int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, Device(PU1, d), id);
  }
  c10::Stream getStream(Device d) const noexcept override { return mk(ix(d), cur_stream[ix(d)]); }
  c10::Stream getDefaultStream(Device d) const override { return mk(ix(d), 0); }
  c10::Stream getNewStream(Device d, int) const override {
    std::lock_guard<std::recursive_mutex> l(mu);
    return mk(ix(d), 1 + g_pool++ % 32);
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override {
    auto d = s.device_index();
    auto o = mk(d, cur_stream[d]);
    cur_stream[d] = s.id();
    return o;
  }
  void destroyEvent(void* e, DeviceIndex) const noexcept override { delete (Ev*)e; }
  void record(void** e, const c10::Stream& s, DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> l(mu);
    if (!*e) *e = new Ev;
    auto x = (Ev*)*e;
    auto g = gid(s.device_index(), s.id());
    tick(g);
    x->vc = streams[g];
    x->rec = true;
    x->polls = 0;
    x->t = now();
  }
  void block(void* e, const c10::Stream& s) const override {
    std::lock_guard<std::recursive_mutex> l(mu);
    if (e) merge(streams[gid(s.device_index(), s.id())], ((Ev*)e)->vc);
  }
  bool queryEvent(void* e) const override {
    if (!e) return true;
    auto x = (Ev*)e;
    std::lock_guard<std::recursive_mutex> l(mu);
    for (auto& [k, v] : x->vc)
      if (at_(host, k) < v) {
        if (x->polls++ == 0) return false;
        host_join(x->vc, "");
        return true;
      }
    return true;
  }
  void synchronizeEvent(void* e) const override {
    if (e) host_join(((Ev*)e)->vc, "event_sync");
  }
  bool queryStream(const c10::Stream& s) const override {
    std::lock_guard<std::recursive_mutex> l(mu);
    for (auto& [k, v] : streams[gid(s.device_index(), s.id())])
      if (at_(host, k) < v) return false;
    return true;
  }
  void synchronizeStream(const c10::Stream& s) const override {
    host_join(streams[gid(s.device_index(), s.id())], "stream_sync");
  }
  void synchronizeDevice(const DeviceIndex d) const override {
    VC a;
    {
      std::lock_guard<std::recursive_mutex> l(mu);
      for (auto& [k, v] : streams)
        if (k / 1000 == (d < 0 ? cur_dev : d)) merge(a, v);
    }
    host_join(a, "device_sync");
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    std::lock_guard<std::recursive_mutex> l(mu);
    if (p.get_deleter() == &del) ((Block*)p.get_context())->rec.insert(gid(s.device_index(), s.id()));
  }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override { return ((Ev*)b)->t - ((Ev*)a)->t; }
  DeviceIndex deviceCount() const noexcept override { return n_dev; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }  // virtual since torch 2.7
  bool isAvailable() const { return n_dev > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return n_dev; }
  void setCurrentDevice(DeviceIndex d) const override {
    Guard::chk(d);
    cur_dev = d;
  }
  DeviceIndex getCurrentDevice() const override { return cur_dev; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto o = cur_dev;
    if (d >= 0) {
      Guard::chk(d);
      cur_dev = d;
    }
    return o;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override {
    std::lock_guard<std::recursive_mutex> l(mu);
    return pinned.count(const_cast<void*>(p));
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pin_alloc; }
  Device getDeviceFromPtr(void*) const override { return Device(PU1, cur_dev); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return def_gen(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override {
    return at::make_generator<Gen>(d < 0 ? cur_dev : d);
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    auto i = s.unsafeGetStorageImpl();
    if (n == 0) {
      DevG g(i->device().index());
      i->set_data_ptr_noswap(alloc.allocate(0));
      i->set_nbytes(0);
    } else
      grow(i, n);
  }
};
// ------------------------------------------------------------------ "hccl": gloo over the aliased bytes, on
// a comm stream
using WP = c10::intrusive_ptr<c10d::Work>;
struct SimWork final : c10d::Work {
  WP in;
  std::vector<Tensor> outs;
  VC done;
  c10::intrusive_ptr<c10::ivalue::Future> fut;
  DeviceIndex d;
  SimWork(WP w, std::vector<Tensor> o, VC v, DeviceIndex dd)
      : in(std::move(w)), outs(std::move(o)), done(std::move(v)), d(dd) {
    fut = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                   std::vector<Device>{Device(PU1, d)});
  }
  bool isCompleted() override { return in->isCompleted(); }
  bool isSuccess() const override { return in->isSuccess(); }
  std::vector<Tensor> result() override { return outs; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds t) override {
    bool r = in->wait(t);
    std::lock_guard<std::recursive_mutex> l(mu);
    merge(streams[cur()], done);
    return r;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (!fut->completed()) {
      in->wait();
      DevG g(d);
      cur_stream[d] = cur_stream[d];
      {
        std::lock_guard<std::recursive_mutex> l(mu);
        merge(streams[cur()], done);
      }
      fut->markCompleted(IValue(outs));
    }
    return fut;
  }
};
struct Hccl final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> g;
  Hccl(c10::intrusive_ptr<c10d::Backend> b) : Backend(b->getRank(), b->getSize()), g(std::move(b)) {}
  const std::string getBackendName() const override { return "hccl"; }
  bool supportsSplitting() const override { return false; }
  // Source: the table of the real backend. What only moves bytes takes every dtype.
  static void reducible(const Tensor& t, const c10d::ReduceOp& op) {
    static const std::set<at::ScalarType> dtypes{at::kChar, at::kByte, at::kShort,    at::kInt,
                                                 at::kLong, at::kHalf, at::kBFloat16, at::kFloat};
    using R = c10d::ReduceOp;
    TORCH_CHECK(dtypes.count(t.scalar_type()), "sim hccl: dtype ", t.scalar_type(),
                " is not supported for reduction");
    auto o = op.op_;
    TORCH_CHECK(o == R::SUM || o == R::AVG || o == R::MIN || o == R::MAX || o == R::PRODUCT,
                "sim hccl: ReduceOp is not supported");
  }
  std::vector<Tensor> al(Ctx& c, const std::vector<Tensor>& v) {
    std::vector<Tensor> r;
    for (auto& t : v) {
      TORCH_CHECK(t.device().type() == PU1, "hccl: npu tensor expected");
      r.push_back(c.cpu(t));
    }
    return r;
  }
  WP go(const char* op, const std::vector<Tensor>& ins, const std::vector<Tensor>& outs,
        std::vector<Tensor> res, const std::function<WP()>& f) {
    VC v;
    DeviceIndex d = !outs.empty()  ? outs[0].device().index()
                    : !ins.empty() ? ins[0].device().index()
                                   : cur_dev;
    {
      std::lock_guard<std::recursive_mutex> l(mu);
      DevG dg(d);
      auto k = gid(d, COMM);
      sim::merge(streams[k], streams[cur()]);
      tick(k);
      launches[std::string("hccl_") + op]++;
      for (auto& t : ins) {
        touch(t, k, false, op);
        if (auto b = block_of(t)) b->rec.insert(k);
      }
      for (auto& t : outs) {
        touch(t, k, true, op);
        if (auto b = block_of(t)) b->rec.insert(k);
      }
      v = streams[k];
    }
    return c10::make_intrusive<SimWork>(f(), std::move(res), std::move(v), d);
  }
  WP allreduce(std::vector<Tensor>& t, const c10d::AllreduceOptions& o) override {
    reducible(t[0], o.reduceOp);
    Ctx c;
    auto a = al(c, t);
    return go("allreduce", {}, t, t, [&] { return g->allreduce(a, o); });
  }
  WP allreduce_coalesced(std::vector<Tensor>& t, const c10d::AllreduceCoalescedOptions& o) override {
    for (auto& one : t) reducible(one, o.reduceOp);
    Ctx c;
    auto a = al(c, t);
    return go("allreduce_coalesced", {}, t, t, [&] { return g->allreduce_coalesced(a, o); });
  }
  WP broadcast(std::vector<Tensor>& t, const c10d::BroadcastOptions& o) override {
    Ctx c;
    auto a = al(c, t);
    return go("broadcast", {}, t, t, [&] { return g->broadcast(a, o); });
  }
  WP reduce(std::vector<Tensor>& t, const c10d::ReduceOptions& o) override {
    reducible(t[0], o.reduceOp);
    Ctx c;
    auto a = al(c, t);
    return go("reduce", {}, t, t, [&] { return g->reduce(a, o); });
  }
  WP allgather(std::vector<std::vector<Tensor>>& os, std::vector<Tensor>& is,
               const c10d::AllgatherOptions& o) override {
    Ctx c;
    auto i = al(c, is);
    std::vector<std::vector<Tensor>> x{al(c, os[0])};
    return go("allgather", is, os[0], os[0], [&] { return g->allgather(x, i, o); });
  }
  WP _allgather_base(Tensor& ot, Tensor& it, const c10d::AllgatherOptions& o) override {
    Ctx c;
    auto a = c.cpu(ot), b = c.cpu(it);
    return go("allgather_base", {it}, {ot}, {ot}, [&] { return g->_allgather_base(a, b, o); });
  }
  WP _reduce_scatter_base(Tensor& ot, Tensor& it, const c10d::ReduceScatterOptions& o) override {
    reducible(it, o.reduceOp);
    Ctx c;
    auto a = c.cpu(ot), b = c.cpu(it);
    return go("reduce_scatter_base", {it}, {ot}, {ot}, [&] { return g->_reduce_scatter_base(a, b, o); });
  }
  WP allgather_into_tensor_coalesced(std::vector<Tensor>& os, std::vector<Tensor>& is,
                                     const c10d::AllgatherOptions& o) override {
    Ctx c;
    auto x = al(c, os), i = al(c, is);
    return go("allgather_into_tensor_coalesced", is, os, os,
              [&] { return g->allgather_into_tensor_coalesced(x, i, o); });
  }
  WP reduce_scatter_tensor_coalesced(std::vector<Tensor>& os, std::vector<Tensor>& is,
                                     const c10d::ReduceScatterOptions& o) override {
    for (auto& one : is) reducible(one, o.reduceOp);
    Ctx c;
    auto x = al(c, os), i = al(c, is);
    return go("reduce_scatter_tensor_coalesced", is, os, os,
              [&] { return g->reduce_scatter_tensor_coalesced(x, i, o); });
  }
  WP gather(std::vector<std::vector<Tensor>>& os, std::vector<Tensor>& is,
            const c10d::GatherOptions& o) override {
    Ctx c;
    auto i = al(c, is);
    std::vector<std::vector<Tensor>> x;
    std::vector<Tensor> flat;
    for (auto& v : os) {
      x.push_back(al(c, v));
      flat.insert(flat.end(), v.begin(), v.end());
    }
    return go("gather", is, flat, flat, [&] { return g->gather(x, i, o); });
  }
  WP scatter(std::vector<Tensor>& os, std::vector<std::vector<Tensor>>& is,
             const c10d::ScatterOptions& o) override {
    Ctx c;
    auto x = al(c, os);
    std::vector<std::vector<Tensor>> i;
    std::vector<Tensor> flat;
    for (auto& v : is) {
      i.push_back(al(c, v));
      flat.insert(flat.end(), v.begin(), v.end());
    }
    return go("scatter", flat, os, os, [&] { return g->scatter(x, i, o); });
  }
  WP alltoall_base(Tensor& ot, Tensor& it, std::vector<int64_t>& os, std::vector<int64_t>& is,
                   const c10d::AllToAllOptions& o) override {
    Ctx c;
    auto a = c.cpu(ot), b = c.cpu(it);
    return go("alltoall_base", {it}, {ot}, {ot}, [&] { return g->alltoall_base(a, b, os, is, o); });
  }
  WP send(std::vector<Tensor>& t, int r, int tag) override {
    Ctx c;
    auto a = al(c, t);
    return go("send", t, {}, t, [&] { return g->send(a, r, tag); });
  }
  WP recv(std::vector<Tensor>& t, int r, int tag) override {
    Ctx c;
    auto a = al(c, t);
    return go("recv", {}, t, t, [&] { return g->recv(a, r, tag); });
  }
  WP barrier(const c10d::BarrierOptions& o) override { return g->barrier(o); }
};
}  // namespace sim
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  m.def("setup", [](int n) {
    n_dev = n;
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  });
  m.def("register_native", &register_native);
  m.def("set_native", [](std::vector<std::string> v) {
    for (auto& o : v) native_ops.insert(o.substr(0, o.find('.')));
  });
  m.def("set_saturating", [](bool b) {
    saturating = b;
    for (auto& flag : overflowed) flag = false;
  });
  m.def("is_saturating", [] { return saturating; });
  m.def("float_status", [](const Tensor& t) {
    TORCH_CHECK(t.device().type() == PU1 && t.scalar_type() == at::kFloat && t.numel() == 8,
                "float status: 8 float32 elements on the device");
    std::lock_guard<std::recursive_mutex> l(mu);
    DevG g(t.device().index());
    tick(cur());
    launches["npu_get_float_status"]++;
    touch(t, cur(), true, "npu_get_float_status");
    static_cast<float*>(t.data_ptr())[0] = overflowed[cur_dev] ? 1 : 0;
  });
  m.def("clear_float_status", [](const Tensor& t) {
    std::lock_guard<std::recursive_mutex> l(mu);
    DevG g(t.device().index());
    tick(cur());
    launches["npu_clear_float_status"]++;
    overflowed[cur_dev] = false;
  });
  m.def("format_of", [](const Tensor& t) {
    auto b = block_of(t);
    return b ? b->format : 2;
  });
  m.def("set_format", [](const Tensor& t, int format) { block_of(t)->format = format; });
  m.def("set_defer", [](bool b) { defer = b; });
  m.def("stats", [] {
    decltype(syncs) a, b, c;
    decltype(hazards) h;
    {
      py::gil_scoped_release nogil;
      std::lock_guard<std::recursive_mutex> l(mu);
      a = syncs;
      b = launches;
      c = fallbacks;
      h = hazards;
    }
    return py::make_tuple(a, b, c, h);
  });
  m.def("reset", [] {
    py::gil_scoped_release nogil;
    std::lock_guard<std::recursive_mutex> l(mu);
    syncs.clear();
    launches.clear();
    fallbacks.clear();
    hazards.clear();
  });
  m.def("mem", [](int d, bool peak) { return peak ? mem_peak[d] : mem_now[d]; });
  m.def("reset_peak", [](int d) { mem_peak[d] = mem_now[d]; });
  m.def("cur_dev", [] { return int(cur_dev); });
  m.def("set_dev", [](int d) {
    Guard::chk(d);
    cur_dev = d;
  });
  m.def("default_generator", [](int d) { return def_gen(d); });
  py::class_<Hccl, c10d::Backend, c10::intrusive_ptr<Hccl>>(m, "Hccl").def(
      py::init([](c10::intrusive_ptr<c10d::Backend> b) { return c10::make_intrusive<Hccl>(b); }));
}
