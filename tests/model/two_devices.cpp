// A backend of ggml with two devices that pass for GPUs and compute on the CPU: `add_devices` adds them to the process.
// Their memory is no host memory to ggml, and they claim streams and events, each of which is complete at once.
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"

static const char * const names[] = { "TWO0", "TWO1" };

static ggml_backend_device      devices[2];
static ggml_backend_buffer_type types[2];
static ggml_backend_reg         registry;

static size_t index_of(ggml_backend_dev_t device) {
    return device - devices;
}

static ggml_backend_t open(ggml_backend_dev_t device, const char *) {
    ggml_backend_t backend       = ggml_backend_cpu_init();
    backend->device              = device;
    backend->iface.event_record  = [](auto...) {};
    backend->iface.event_wait    = [](auto...) {};
    ggml_backend_cpu_set_n_threads(backend, 1);
    return backend;
}

static void describe(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    *props             = {};
    props->name        = names[index_of(device)];
    props->description = "half of two";
    props->type        = GGML_BACKEND_DEVICE_TYPE_GPU;
    props->memory_free = props->memory_total = size_t(1) << 33;
    props->caps.async = props->caps.events = true;
}

extern "C" void add_devices() {
    for (size_t i = 0; i < 2; ++i) {
        types[i].device              = &devices[i];
        types[i].iface.get_name      = [](ggml_backend_buffer_type_t type) { return names[index_of(type->device)]; };
        types[i].iface.get_alignment = [](auto...) { return size_t(64); };
        types[i].iface.alloc_buffer  = [](ggml_backend_buffer_type_t type, size_t size) {
            ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
            buffer->buft                 = type;
            return buffer;
        };
        auto & iface            = devices[i].iface;
        devices[i].reg          = &registry;
        iface.get_name          = [](ggml_backend_dev_t device) { return names[index_of(device)]; };
        iface.get_description   = [](auto...) { return "half of two"; };
        iface.get_memory        = [](ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = size_t(1) << 33; };
        iface.get_type          = [](auto...) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
        iface.get_props         = describe;
        iface.init_backend      = open;
        iface.get_buffer_type   = [](ggml_backend_dev_t device) { return &types[index_of(device)]; };
        iface.supports_op       = [](auto...) { return true; };
        iface.supports_buft     = [](ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
            return type == &types[index_of(device)];
        };
        iface.event_new         = [](ggml_backend_dev_t device) { return new ggml_backend_event{ device, nullptr }; };
        iface.event_free        = [](ggml_backend_dev_t, ggml_backend_event_t event) { delete event; };
        iface.event_synchronize = [](auto...) {};
    }
    registry.api_version            = GGML_BACKEND_API_VERSION;
    registry.iface.get_name         = [](auto...) { return "TWO"; };
    registry.iface.get_device_count = [](auto...) { return size_t(2); };
    registry.iface.get_device       = [](ggml_backend_reg_t, size_t i) { return &devices[i]; };
    registry.iface.get_proc_address = [](auto...) { return static_cast<void *>(nullptr); };
    ggml_backend_register(&registry);
}
