// Functions of the device library that ggml does not offer. They are looked up by name in the loaded library, since the
// extension is linked to none; if one is missing, its feature is off.
#pragma once

#include "ggml-backend.h"

class device_runtime {
public:
    static const device_runtime & instance();

    bool can_pin() const { return register_memory != nullptr; }

    // Makes `size` bytes at `data` memory that the device copies fast; false if the system refuses.
    bool pin(void * data, size_t size) const;

    // Takes that back; false, and the memory stays as it is, where that cannot be done.
    bool unpin(void * data) const;

    // Whether `is_complete` supports events of `device`.
    bool can_ask(ggml_backend_dev_t device) const;

    // Whether all work recorded before `event` is done. Does not wait.
    bool is_complete(ggml_backend_event_t event) const;

private:
    using register_function   = int (*)(void *, size_t, unsigned);
    using unregister_function = int (*)(void *);
    using query_function      = int (*)(void *);
    using error_function      = int (*)();

    device_runtime();

    // Whether a call that returned `code` succeeded. An error would else be found later, and be taken for another's.
    bool succeeded(int code) const;

    const char *        backend           = "";  // ggml's name for what is loaded
    register_function   register_memory   = nullptr;
    unregister_function unregister_memory = nullptr;
    query_function      query_event       = nullptr;
    error_function      clear_error       = nullptr;
};
