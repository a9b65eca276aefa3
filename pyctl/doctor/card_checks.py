"""Checks of cards, the driver, and llama.cpp's build."""

from __future__ import annotations

from pyctl.doctor.facts import Facts
from pyctl.doctor.finding import Finding, slow, wrong
from pyctl.machine.pin import read_pin
from pyctl.setup.plan import DRIVER_ERRORS, MIN_DRIVER

__all__ = ["build", "driver", "libraries", "link", "pinned"]

DRIVER_OF = {11: "450", 12: "525", 13: MIN_DRIVER}
"""The oldest driver that speaks a CUDA version."""

SETUP = "pyctl setup"

NO_GPUS = "start the container with --gpus all, and install nvidia-container-toolkit on the host"

CUINIT = {
    **DRIVER_ERRORS,
    2: "the card has no memory left for another program; end programs that nvidia-smi lists",
    46: "another program has the card for itself; sudo nvidia-smi -c DEFAULT",
    804: (
        "the driver's compatibility library does not fit this card; take its directory out of "
        "LD_LIBRARY_PATH"
    ),
}
"""The meaning of a code of cuInit, and its fix after a semicolon."""


def libraries(facts: Facts) -> list[Finding]:
    """Check that llama.cpp's libraries load, and that all of the extension fits them."""
    error = facts.llama.error
    fix = "reinstall pyctl (docs/install.md)"
    if error:
        return [wrong(f"llama.cpp cannot be loaded: {error}", fix)]
    fix = (
        f"pyctl setup --pinned: llama-cpp-python {read_pin().release} and the whole extension; "
        f"or {fix}"
    )
    return [slow(line, fix) for line in facts.llama.describe_missing()]


def driver(facts: Facts) -> list[Finding] | None:
    """Check that the NVIDIA driver exists, works, and supports the CUDA version of the build."""
    if not facts.has_nvidia:
        return None
    fix = (
        NO_GPUS
        if facts.is_container
        else f"sudo apt install nvidia-driver-{MIN_DRIVER}, then reboot"
    )
    driver_facts = facts.driver
    if driver_facts is None:
        return [wrong("there is an NVIDIA card, but no driver (libcuda.so.1)", fix)]
    if driver_facts.error:
        text, _, fix = CUINIT.get(
            driver_facts.error, "the driver fails; look at nvidia-smi and dmesg"
        ).partition("; ")
        return [wrong(f"{text} (cuInit {driver_facts.error})", fix)]
    needed = facts.llama.cuda()
    if needed > driver_facts.cuda[0] > 0:
        speaks = ".".join(map(str, driver_facts.cuda))
        version = DRIVER_OF.get(needed, "a newer one")
        text = f"driver {driver_facts.release} speaks CUDA {speaks}, this build needs CUDA {needed}"
        return [wrong(text, f"install driver {version} or newer, or {SETUP}")]
    return []


def build(facts: Facts) -> list[Finding] | None:
    """Check that llama.cpp was built for the card of this machine."""
    if not facts.has_nvidia:
        return None
    if facts.llama.gpus() or facts.driver is None or facts.driver.error:
        return []  # an error of the driver has its own check
    text, _, fix = facts.llama.idle_card().rpartition("; ")
    return [wrong(text, fix.rpartition(": ")[2])] if text else []


def pinned(facts: Facts) -> list[Finding] | None:
    """Check that snapshots in RAM can be pinned: pageable memory is copied to a card at a third of
    the speed.
    """
    if not facts.llama.gpus():
        return None
    error = facts.llama.pin_error()
    if not error:
        return []
    fix = (
        "give Windows' WSL more memory (.wslconfig)"
        if facts.is_wsl
        else f"{SETUP}, or update the driver"
    )
    return [slow(f"memory for snapshots cannot be pinned: {error}", fix)]


def link(facts: Facts) -> list[Finding] | None:
    """Check that each card has all its PCIe lanes, at its own generation."""
    if not facts.has_nvidia or facts.is_wsl:
        return None
    findings = []
    for card in facts.cards:
        lanes, maximum = card.lanes
        generation, newest = card.generations
        # Lanes add up, and each generation doubles the last one's speed. Unknown values count as
        # the best.
        slower = (maximum / lanes if lanes and maximum else 1.0) * 2.0 ** (
            (newest or 0) - (generation or newest or 0)
        )
        if slower > 1:
            text = (
                f"{card.name} has {lanes} of {maximum} PCIe lanes of generation {generation} "
                f"of {newest}"
            )
            effect = f"copies between RAM and card take {slower:.0f} times as long"
            findings.append(
                slow(
                    f"{text}: {effect}",
                    "use the mainboard's slot for graphics cards, without a riser",
                )
            )
    return findings
