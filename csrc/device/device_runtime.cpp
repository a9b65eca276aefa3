#include "device/device_runtime.h"

#include "library/context.h"

#include <dlfcn.h>

#include <cstring>
#include <string>

namespace {

constexpr unsigned portable = 1;  // cudaHostRegisterPortable, hipHostRegisterPortable

template <typename F> void look_up(F & function, const std::string & name) {
    function = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name.c_str()));
}

struct functions {
    const char * backend                            = "";  // ggml's name of the loaded runtime
    int (*register_memory)(void *, size_t, unsigned) = nullptr;
    int (*unregister_memory)(void *)                 = nullptr;
    int (*query_event)(void *)                       = nullptr;
    int (*clear_error)()                             = nullptr;

    functions(const char * name, const std::string & prefix) : backend(name) {
        look_up(register_memory, prefix + "HostRegister");
        look_up(unregister_memory, prefix + "HostUnregister");
        look_up(query_event, prefix + "EventQuery");
        look_up(clear_error, prefix + "GetLastError");
    }
};

const functions & loaded() {
    static const functions cuda("CUDA", "cuda"), hip("ROCm", "hip");
    return cuda.register_memory != nullptr ? cuda : hip;
}

// Whether a call that returned `code` succeeded. An error would else be found later, and be taken for another's.
bool succeeded(int code) {
    if (code != 0 && loaded().clear_error != nullptr) {
        loaded().clear_error();
    }
    return code == 0;
}

}  // namespace

bool device_runtime::can_pin() {
    return loaded().register_memory != nullptr;
}

bool device_runtime::pin(void * data, size_t size) {
    return succeeded(loaded().register_memory(data, size, portable));
}

bool device_runtime::unpin(void * data) {
    return loaded().unregister_memory != nullptr && succeeded(loaded().unregister_memory(data));
}

bool device_runtime::can_ask(ggml_backend_dev_t device) {
    // Only this backend's events are the device library's own; and "not yet" is an error, which has to be cleared.
    return loaded().query_event != nullptr && loaded().clear_error != nullptr &&
           std::strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device)), loaded().backend) == 0;
}

bool device_runtime::is_complete(ggml_backend_event_t event) {
    return succeeded(loaded().query_event(library::device_event(event)));
}
