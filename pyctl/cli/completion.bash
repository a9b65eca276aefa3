# pyctl fails where a file may stand; then the shell completes files.
_pyctl() {
    local IFS=$'\n'
    COMPREPLY=($(pyctl completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2> /dev/null)) || compopt -o default
}
complete -F _pyctl pyctl
