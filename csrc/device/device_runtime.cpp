#include "device/device_runtime.h"

#include "library/context.h"

#include <dlfcn.h>

#include <cstring>
#include <string>
#include <utility>

namespace {

constexpr unsigned portable = 1;  // cudaHostRegisterPortable, hipHostRegisterPortable

template <typename F> F function_named(const std::string & name) {
    return reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name.c_str()));
}

}  // namespace

const device_runtime & device_runtime::instance() {
    static const device_runtime found;
    return found;
}

device_runtime::device_runtime() {
    using vendor = std::pair<const char *, const char *>;
    for (const auto & [prefix, name] : { vendor("cuda", "CUDA"), vendor("hip", "ROCm") }) {
        const std::string vendor_name(prefix);
        register_memory = function_named<register_function>(vendor_name + "HostRegister");
        if (register_memory != nullptr) {
            backend           = name;
            unregister_memory = function_named<unregister_function>(vendor_name + "HostUnregister");
            query_event       = function_named<query_function>(vendor_name + "EventQuery");
            clear_error       = function_named<error_function>(vendor_name + "GetLastError");
            return;
        }
    }
}

bool device_runtime::succeeded(int code) const {
    if (code != 0 && clear_error != nullptr) {
        clear_error();
    }
    return code == 0;
}

bool device_runtime::pin(void * data, size_t size) const {
    return succeeded(register_memory(data, size, portable));
}

bool device_runtime::unpin(void * data) const {
    return unregister_memory != nullptr && succeeded(unregister_memory(data));
}

bool device_runtime::can_ask(ggml_backend_dev_t device) const {
    // Only this backend's events are the device library's own; and "not yet" is an error, which has to be cleared.
    return query_event != nullptr && clear_error != nullptr &&
           std::strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device)), backend) == 0;
}

bool device_runtime::is_complete(ggml_backend_event_t event) const {
    return succeeded(query_event(library::device_event(event)));
}
