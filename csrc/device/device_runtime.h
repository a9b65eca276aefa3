// Functions of the device library that ggml does not offer. They are looked up by name in the loaded library, since the
// extension is linked to none; if one is missing, its feature is off.
#pragma once

#include "ggml-backend.h"

namespace device_runtime {

bool can_pin();

// Makes `size` bytes at `data` memory that the device copies fast; false if the system refuses.
bool pin(void * data, size_t size);

// Takes that back; false, and the memory stays as it is, if that cannot be done.
bool unpin(void * data);

// Whether `is_complete` supports events of `device`.
bool can_ask(ggml_backend_dev_t device);

// Whether all work recorded before `event` is done. Does not wait.
bool is_complete(ggml_backend_event_t event);

}  // namespace device_runtime
