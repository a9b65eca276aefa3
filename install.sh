#!/bin/sh
# Installs pyctl for this user from a release, a directory or its URL, and sets up an NVIDIA card:
#     sh install.sh DIR-or-URL
#     sh install.sh --remove
#
# Each Python runs with -I: without it, Python imports from the current directory, which may be a stranger's.
set -eu
# A relative XDG directory is invalid and ignored, as in pyctl: this script removes what is below it.
place_of() { case $1 in /*) echo "$1/pyctl" ;; *) echo "$HOME/$2/pyctl" ;; esac; }
data=$(place_of "${XDG_DATA_HOME-}" .local/share)
cache=$(place_of "${XDG_CACHE_HOME-}" .cache)
state=$(place_of "${XDG_STATE_HOME-}" .local/state)
command=$HOME/.local/bin/pyctl
fail() { echo "install.sh: $*" >&2 && exit 1; }
[ ! -e "$command" ] || case $(readlink "$command") in "$data/env"*) ;; *) fail "$command is of another installation" ;; esac

if [ "${1-}" = --remove ]; then
  echo "removing $command, $data, $cache and $state: programs, cached prompts, conversations"
  rm -rf "$command" "$data" "$cache" "$state"
  (cd "$HOME" && rmdir -p .local/bin .local/share .local/state .cache) 2>/dev/null || :
  exit 0
fi

place=${1:-${PYCTL_RELEASE:-}}
[ -n "$place" ] || fail "name the release, a directory or its URL: sh install.sh DIR-or-URL"
python3 -I -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
  fail "Python 3.10 or newer is missing: sudo apt install python3 python3-venv"
uv=$(command -v uv) || python3 -I -c 'import ensurepip, venv' 2>/dev/null ||
  fail "python3-venv is missing: sudo apt install python3-venv (Fedora and Arch have it in python3)"

echo "installing pyctl from $place into $data (300 MB), with the command $command"
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
python3 -I - "$place" "$wheels" <<'PYTHON'
import hashlib, os, pathlib, re, sys, urllib.parse, urllib.request
place, wheels = sys.argv[1:]
base = place.rstrip("/") if "://" in place else pathlib.Path(place).resolve().as_uri()
fits = re.compile(r"-(py3-none|cp3\d+-abi3|cp{}{}-cp\d+)-".format(*sys.version_info[:2])).search


def check(url, before=""):
    """Refuse plain http, but from this machine: SHA256SUMS has no signature, so the way has to be safe."""
    parts = urllib.parse.urlsplit(url)
    is_here = parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1")
    if not (parts.scheme in ("https", "file") or (is_here and not before.startswith("https:"))):
        raise ValueError("a release is a directory or an address of https, also after a redirect: " + url)


class Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, request, reply, code, message, headers, url):
        check(url, request.full_url)
        return super().redirect_request(request, reply, code, message, headers, url)


def read(name, maximum):
    return urllib.request.build_opener(Redirects).open(base + "/" + name, timeout=60).read(maximum)


try:
    check(base)
    sums = read("SHA256SUMS", 2**20).decode()
    for digest, name in re.findall(r"^([0-9a-f]{64}) [ *]([\w.+-]+\.whl)$", sums, re.MULTILINE):
        if fits(name):
            data = read(name, 2**30)
            if hashlib.sha256(data).hexdigest() != digest:
                sys.exit("install.sh: {}/{} is damaged: its SHA-256 is not that of SHA256SUMS".format(base, name))
            pathlib.Path(wheels, name).write_bytes(data)
except (OSError, ValueError) as error:
    sys.exit("install.sh: {}: {}".format(base, error))
os.listdir(wheels) or sys.exit("install.sh: {} has no wheel for Python {}.{}".format(base, *sys.version_info[:2]))
PYTHON

mkdir -p "$data" "${command%/*}"
exec 9<"$data" # the lock goes with this process
flock -n 9 || { echo "waiting for another install.sh" && flock 9; }
# Without the lock this would remove the environment that another installation is about to fill.
clean() { for env in "$data/env" "$data"/env.*; do [ "$(readlink "$command")" = "$env/bin/pyctl" ] || rm -rf "$env"; done; }
trap 'rm -rf "$wheels"; clean' EXIT
new=$(mktemp -d "$data/env.XXXXXX") # the old one works until this one does
if [ -n "$uv" ]; then
  # uv reads settings, such as another index, from the current directory.
  (cd "$new" && uv venv --quiet --python python3 "$new")
  (cd "$new" && uv pip install --quiet --no-cache --python "$new/bin/python" "$wheels"/*.whl)
else
  python3 -I -m venv "$new"
  "$new/bin/python" -I -m pip install --quiet --no-cache-dir --disable-pip-version-check "$wheels"/*.whl
fi
"$new/bin/pyctl" --version >/dev/null
ln -sf "$new/bin/pyctl" "$command"
"$command" setup --yes --release "$place" || echo "pyctl runs on the CPU until this succeeds: pyctl setup --release $place"
echo "done: $command serve --open (to remove pyctl: sh install.sh --remove)"
