// A device of type "cuda" in host memory, for a torch that was built without CUDA. See __init__.py.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <array>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using c10::StreamId;

constexpr DeviceIndex kDevices = 8;
thread_local DeviceIndex current = 0;
thread_local std::array<StreamId, kDevices> streams{};
StreamId newest_stream = 0;

// ---- memory

void free_memory(void* pointer) { std::free(pointer); }

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes == 0 ? nullptr : std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory != nullptr) std::memset(memory, 0xFF, bytes);  // what is read before it is written to is NaN
    return {memory, memory, &free_memory, Device(DeviceType::CUDA, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} device_memory;

std::mutex lock;
std::unordered_set<void*> pinned;

void free_pinned(void* pointer) {
  std::lock_guard<std::mutex> guard(lock);
  pinned.erase(pointer);
  std::free(pointer);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::mutex> guard(lock);
    void* memory = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    pinned.insert(memory);
    return {memory, memory, &free_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinned_memory;

bool is_pinned(const Tensor& x) { return pinned.count(x.storage().mutable_data()) != 0; }

// ---- copies that the host does not wait for: their result is garbage until it does

struct Copy {
  StreamId stream;
  uint64_t number;
  Tensor host, values;
  bool to_device;
};
struct Wait {
  StreamId stream, other;
  uint64_t number;  // of the last copy of the other stream that the stream waits for
};
std::vector<Copy> copies;
std::vector<Wait> waits;
uint64_t newest_copy = 0;

Tensor on_host(const Tensor& x) {  // the same memory
  auto options = at::TensorOptions().dtype(x.dtype()).device(at::kCPU);
  Tensor alias = x.is_cuda() ? at::from_blob(x.data_ptr(), x.sizes(), x.strides(), options) : x;
  if (x.is_cuda() && x.is_conj()) alias = alias.conj();
  if (x.is_cuda() && x.is_neg()) alias = alias._neg_view();
  return alias;
}

void finish(StreamId stream, uint64_t number) {
  for (const Wait& wait : std::vector<Wait>(waits))
    if (wait.stream == stream && wait.number < number + 1 && wait.other != stream) {
      waits.erase(std::remove_if(waits.begin(), waits.end(), [&](const Wait& one) {
        return one.stream == wait.stream && one.other == wait.other && one.number <= wait.number; }), waits.end());
      finish(wait.other, wait.number);
    }
  std::vector<Copy> done;
  for (auto copy = copies.begin(); copy != copies.end();)
    if (copy->stream == stream && copy->number <= number) {
      done.push_back(*copy);
      copy = copies.erase(copy);
    } else {
      ++copy;
    }
  for (const Copy& copy : done) {
    if (copy.to_device) {
      TORCH_CHECK(on_host(copy.host).equal(copy.values) || copy.host.is_floating_point(),
                  "Pinned memory was written to before its copy to the device had ended");
    } else {
      at::NoGradGuard no_grad;
      std::memcpy(copy.host.data_ptr(), copy.values.data_ptr(), copy.values.nbytes());
    }
  }
}

// ---- generators and hooks

struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(DeviceIndex index) {
    device_ = Device(DeviceType::CUDA, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
};

const at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> made = [] {
    std::vector<at::Generator> all;
    for (DeviceIndex i = 0; i < kDevices; ++i) all.push_back(at::make_generator<DeviceGenerator>(i));
    return all;
  }();
  return made.at(index < 0 ? current : index);
}

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override { return pinned.count(const_cast<void*>(data)) != 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? current : index);
  }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, current); }
  DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
};

struct Event {
  StreamId stream;
  uint64_t number;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "CUDA error: invalid device ordinal");
    current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Stream getStream(Device device) const override { return Stream(Stream::UNSAFE, device, streams.at(device.index())); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::UNSAFE, device, ++newest_stream); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    streams.at(stream.device_index()) = stream.id();
    return before;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {stream.id(), newest_copy};
  }
  void block(void* event, const Stream& stream) const override {
    auto* found = static_cast<Event*>(event);
    if (found != nullptr) waits.push_back({stream.id(), found->stream, found->number});
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override { finish(stream.id(), newest_copy); }
  void synchronizeEvent(void* event) const override {
    auto* found = static_cast<Event*>(event);
    if (found != nullptr) finish(found->stream, found->number);
  }
  void synchronizeDevice(const DeviceIndex) const override {
    for (StreamId stream = 0; stream <= newest_stream; ++stream) finish(stream, newest_copy);
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};

// ---- operations

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

int64_t host_waits = 0;               // of the host for the device
py::object* told_of_wait = nullptr;   // called at each of them
thread_local bool is_kernel = false;  // whether a kernel is computed on the host, whose copies are none of a GPU

void count_wait() {
  if (is_kernel) return;
  ++host_waits;
  if (told_of_wait == nullptr) return;
  py::gil_scoped_acquire gil;
  (*told_of_wait)();
}

void ended_before(Device device) { finish(streams.at(device.index()), newest_copy); }

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  at::NoGradGuard no_grad;
  Device device = self.is_cuda() ? self.device() : source.device();
  // a stream reads memory of the host after all copies to it that the stream has waited for
  if (self.is_cuda() && !source.is_cuda() && is_pinned(source)) ended_before(device);
  on_host(self).copy_(on_host(source));
  if (self.is_cuda() && source.is_cuda()) return self;
  const Tensor& host = self.is_cuda() ? source : self;
  if (!non_blocking || !is_pinned(host) || !host.is_contiguous()) {
    count_wait();
    ended_before(device);
  } else {
    copies.push_back({streams.at(device.index()), ++newest_copy, host, host.clone(), self.is_cuda()});
    if (!self.is_cuda()) std::memset(self.data_ptr(), 0xFF, self.nbytes());
  }
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& to, bool) {
  at::NoGradGuard no_grad;
  on_host(to).copy_(on_host(source));
  return to;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::DataPtr made = device_memory.allocate(bytes);
  std::memcpy(made.mutable_get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  if (self.sizes() == size) return self;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t bytes = self.itemsize() * (impl->numel() + impl->storage_offset());
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  return self;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& to) {
  resize_(to, source.sizes(), std::nullopt);
  return copy_from(source, to, false);
}

Tensor strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                         self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return view;
}

Tensor reshape_alias(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return strided(self, size, stride, self.storage_offset());
}

Tensor view_by_host(const Tensor& self, const Tensor& shape) {  // strides as on the host
  return strided(self, shape.sizes(), shape.strides(), self.storage_offset());
}

Tensor view(const Tensor& self, at::IntArrayRef size) { return view_by_host(self, on_host(self).view(size)); }

Tensor view_dtype(const Tensor& self, at::ScalarType dtype) {
  Tensor shape = on_host(self).view(dtype);
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                         self.key_set(), shape.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(
      shape.sizes(), shape.strides(), self.storage_offset() * self.itemsize() / shape.itemsize());
  return made;
}

Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return view_by_host(self, on_host(self).unfold(dim, size, step));
}

at::Scalar local_scalar(const Tensor& self) {
  count_wait();
  ended_before(self.device());
  return on_host(self).item();
}

Tensor& set_storage(Tensor& self, c10::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  int64_t length = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {length}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &device_memory, true), 0, {0}, {});
}

bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
      self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
      self.strides() == other.strides();
}

Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {  // of integers, too
  return on_host(self).to(at::kDouble).histc(bins, min, max).to(self.options());
}

// the fallback does not know that statistics are written to
std::tuple<Tensor, Tensor, Tensor> native_batch_norm(
    const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& mean, const std::optional<Tensor>& variance, bool training, double momentum,
    double epsilon) {
  auto host = [](const std::optional<Tensor>& x) {
    return x.has_value() && x->defined() ? std::optional<Tensor>(on_host(*x)) : std::nullopt;
  };
  auto [result, saved_mean, saved_variance] = at::native_batch_norm(
      on_host(input), host(weight), host(bias), host(mean), host(variance), training, momentum, epsilon);
  return {result.to(input.device()), saved_mean.to(input.device()), saved_variance.to(input.device())};
}

void record_stream(Tensor&, Stream) {}

void check_devices(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  static const std::unordered_set<std::string> takes_indices{
      "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index"};
  if (takes_indices.count(op.schema().name()) != 0) return;
  std::optional<Device> device;
  auto check = [&](const Tensor& x) {
    if (!x.defined() || (x.device().is_cpu() && x.dim() == 0)) return;
    TORCH_CHECK(!device.has_value() || *device == x.device(), "Expected all tensors to be on the same device, but found ",
                *device, " and ", x.device(), " (", op.schema().name(), ")");
    device = x.device();
  };
  size_t count = op.schema().arguments().size();
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    const c10::IValue& value = stack[i];
    if (value.isTensor()) check(value.toTensor());
    if (value.isTensorList())
      for (const Tensor& x : value.toTensorVector()) check(x);
    if (value.isOptionalTensorList())
      for (const std::optional<Tensor>& x : value.toOptionalTensorVector())
        if (x.has_value()) check(*x);
  }
}

// Whether the host of a GPU learns the size of the result, or an answer, from the device.
bool waits_for(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  static const std::unordered_set<std::string> sized{
      "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::equal", "aten::bincount"};
  static const std::unordered_set<std::string> indexed{
      "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index"};
  const std::string& name = op.schema().name();
  size_t first = stack.size() - op.schema().arguments().size();
  if (name == "aten::repeat_interleave") return stack.back().isNone();  // the size of the output
  if (indexed.count(name) == 0) return sized.count(name) != 0;
  // a mask that is filled with one value is not looked at
  if (name != "aten::index" && name != "aten::_unsafe_index" && stack[first + 2].toTensor().numel() == 1) return false;
  for (const std::optional<Tensor>& x : stack[first + 1].toOptionalTensorVector())
    if (x.has_value() && x->defined() && (x->scalar_type() == at::kBool || x->scalar_type() == at::kByte || x->is_cpu()))
      return true;
  return false;
}

// Whether each result is new, or an argument that the operation writes to and does not resize.
bool takes_memory_as_it_is(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  size_t count = schema.arguments().size();
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = stack[stack.size() - count + i];
    if (schema.arguments()[i].is_out() && !(value.isTensor() && value.toTensor().numel() > 0)) return false;
  }
  for (const auto& result : schema.returns()) {
    if (result.type()->kind() != c10::TypeKind::TensorType) return false;
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return false;
  }
  return true;
}

Tensor of_device(const Tensor& host, Device device) {  // a new tensor of the host, whose memory the device takes over
  auto* owner = new Tensor(host);
  void* memory = host.storage().mutable_data();
  c10::DataPtr pointer(memory, owner, [](void* one) { delete static_cast<Tensor*>(one); }, device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), host.storage().nbytes(), std::move(pointer), &device_memory, true);
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                         host.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  return made;
}

// As `at::native::cpu_fallback`, without copies.
void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  if (!takes_memory_as_it_is(schema, *stack)) return at::native::cpu_fallback(op, stack);
  size_t count = schema.arguments().size(), first = stack->size() - count;
  std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  std::optional<Device> device;
  std::unordered_map<const c10::TensorImpl*, Tensor> aliases;
  std::unordered_set<const void*> taken;
  auto host = [&](const Tensor& x) {
    if (!x.defined() || !x.is_cuda()) return x;
    if (!device.has_value()) device = x.device();
    Tensor& alias = aliases[x.unsafeGetTensorImpl()];
    if (!alias.defined()) taken.insert((alias = on_host(x)).storage().data());
    return alias;
  };
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = host(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> found;
      for (const Tensor& x : value.toTensorVector()) found.push_back(host(x));
      value = c10::IValue(found);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> found;
      for (const std::optional<Tensor>& x : value.toOptionalTensorVector())
        found.push_back(x.has_value() ? std::optional<Tensor>(host(*x)) : std::nullopt);
      value = c10::IValue(found);
    } else if (value.isDevice()) {
      device = value.toDevice();
      value = c10::IValue(Device(DeviceType::CPU));
    }
  }
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  } catch (const c10::Error& error) {  // of a kernel that gives its result another size
    if (std::string(error.what()).find("not resizable") == std::string::npos) throw;
    stack->resize(first);
    stack->insert(stack->end(), given.begin(), given.end());
    return at::native::cpu_fallback(op, stack);
  }
  size_t returned = schema.returns().size();
  for (size_t i = 0; i < returned; ++i) {
    c10::IValue& value = (*stack)[stack->size() - returned + i];
    const auto* alias = schema.returns()[i].alias_info();
    if (alias != nullptr) {
      for (size_t k = 0; k < count; ++k)
        if (schema.arguments()[k].alias_info() != nullptr && *schema.arguments()[k].alias_info() == *alias) value = given[k];
    } else if (value.isTensor() && value.toTensor().defined()) {
      const Tensor& made = value.toTensor();
      value = of_device(taken.count(made.storage().data()) == 0 ? made : made.clone(), device.value_or(Device(DeviceType::CUDA, current)));
    }
  }
}

// Computes on the host. Random numbers come from the generator of the device.
void on_host_instead(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_devices(op, *stack);
  if (waits_for(op, *stack)) count_wait();
  struct Kernel {
    bool before = std::exchange(is_kernel, true);
    ~Kernel() { is_kernel = before; }
  } kernel;
  const auto& arguments = op.schema().arguments();
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) {
    compute(op, stack);
    return;
  }
  at::Generator generator = default_generator(current);
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[stack->size() - arguments.size() + i];
    if (!value.isGenerator()) continue;
    generator = value.toGenerator();
    TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
                generator.device(), "'");
    value = c10::IValue();
  }
  at::Generator host = at::detail::getDefaultCPUGenerator();
  Tensor before = host.get_state();
  host.set_state(generator.get_state());
  compute(op, stack);
  generator.set_state(host.get_state());
  host.set_state(before);
}
}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host_instead>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("as_strided", strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("view.dtype", view_dtype);
  m.impl("unfold", unfold);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("is_set_to", is_set_to);
  m.impl("histc", histc);
  m.impl("native_batch_norm", native_batch_norm);
  // torch would compose these, with intermediate results rounded to bfloat16, which kernels of CPU and CUDA do not do
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&on_host_instead>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&on_host_instead>());
  // torch would choose kernels by the type of the device
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&on_host_instead>());
  m.impl("record_stream", record_stream);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(DeviceType::CUDA, &device_memory);
  // torch has made the hooks of a build without CUDA when it was imported: ours take their place
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks;
  m.def("current_device", [] { return static_cast<int>(current); });
  m.def("set_device", [](int index) { Guard().setDevice(Device(DeviceType::CUDA, static_cast<DeviceIndex>(index))); });
  m.def("set_stream", [](int64_t id, int index) { return std::exchange(streams.at(index), id); });
  m.def("stream", [](int index) { return streams.at(index); });
  m.def("default_generator", [](int index) { return default_generator(static_cast<DeviceIndex>(index)); });
  m.def("on_host", on_host);
  m.def("waits", [] { return host_waits; });
  m.def("tell_of_waits", [](py::object told) { told_of_wait = told.is_none() ? nullptr : new py::object(told); });
  m.def("resize_storage", [](const Tensor& x, size_t bytes) { resize_storage(x.storage(), bytes); });
  m.attr("DEVICES") = static_cast<int>(kDevices);
}
