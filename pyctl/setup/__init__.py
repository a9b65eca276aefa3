"""Facts about this machine, and llama.cpp's libraries built for it once, outside of the Python environment.

The package needs the standard library alone, since parts of it run before anything is installed.
"""

from __future__ import annotations

from pyctl.setup.build import (
    Build,
    build_lock,
    compile_libraries,
    place_libraries,
    stage_libraries,
    unpacked_source,
)
from pyctl.setup.control_groups import memory_groups
from pyctl.setup.libraries import (
    BuiltLibraries,
    build_home,
    covers,
    cpu_features,
    data_home,
    libraries_at,
    unused_card,
    use_libraries,
)
from pyctl.setup.machine import (
    Card,
    Compiler,
    Driver,
    Machine,
    PciCard,
    Program,
    find_compiler,
    free_bytes,
    look_at_machine,
)
from pyctl.setup.plan import (
    DRIVER_ERRORS,
    BuildPlan,
    SetupOptions,
    check_compiler,
    check_room,
    describe,
    jobs_for,
    make_plan,
    missing_packages,
    parse_architectures,
)
from pyctl.setup.source import Pin, download_source, pip_command, read_pin, unpack_source
from pyctl.setup.toolkit import BuildTools, Toolkit, install_toolkit, install_tools, probe_system_toolkit

__all__ = [
    "DRIVER_ERRORS",
    "Build",
    "BuildPlan",
    "BuildTools",
    "BuiltLibraries",
    "Card",
    "Compiler",
    "Driver",
    "Machine",
    "PciCard",
    "Pin",
    "Program",
    "SetupOptions",
    "Toolkit",
    "build_home",
    "build_lock",
    "check_compiler",
    "check_room",
    "compile_libraries",
    "covers",
    "cpu_features",
    "data_home",
    "describe",
    "download_source",
    "find_compiler",
    "free_bytes",
    "install_toolkit",
    "install_tools",
    "jobs_for",
    "libraries_at",
    "look_at_machine",
    "make_plan",
    "memory_groups",
    "missing_packages",
    "parse_architectures",
    "pip_command",
    "place_libraries",
    "probe_system_toolkit",
    "read_pin",
    "stage_libraries",
    "unpack_source",
    "unpacked_source",
    "unused_card",
    "use_libraries",
]
