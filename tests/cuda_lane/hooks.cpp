// Lets autograd run on tensors of a CUDA device that does not exist.
//
// The engine of autograd asks whether the device has a context, and torch raises where there is no such device. Here
// the answer is no: the table of virtual functions of torch's hooks is copied, with another function in one place.

#include <ATen/detail/CUDAHooksInterface.h>

#include <algorithm>
#include <cstring>

namespace {

constexpr std::size_t kSlots = 128;  // More than the class has.
using Method = bool (at::AcceleratorHooksInterface::*)(c10::DeviceIndex) const;

bool has_no_context(const void*, c10::DeviceIndex) { return false; }

}  // namespace

extern "C" void install() {
  static void* table[kSlots];
  // In the ABI of Itanium a pointer to a virtual function is its offset in the table, plus one.
  Method method = &at::AcceleratorHooksInterface::hasPrimaryContext;
  std::ptrdiff_t offset;
  std::memcpy(&offset, &method, sizeof offset);
  auto*** hooks = reinterpret_cast<void***>(const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks()));
  std::copy_n(*hooks - 2, kSlots, table);  // Two entries stand before the functions.
  table[2 + (offset - 1) / sizeof(void*)] = reinterpret_cast<void*>(&has_no_context);
  *hooks = table + 2;
}
