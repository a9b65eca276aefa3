# pyctl fails where a file may stand; then the shell completes files.
_pyctl() {
    local found
    found=$(pyctl completion words "${(@)words[2,CURRENT]}" 2> /dev/null) && compadd -- ${(f)found} || _files
}
compdef _pyctl pyctl
