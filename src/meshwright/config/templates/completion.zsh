#compdef meshwright
# Completion of meshwright for zsh:  @HOW@
_meshwright() {
    local -a commands verbs
    commands=(@COMMANDS@)
    verbs=(@VERBS@)
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    local command=$words[2]
    if [[ $command == (data|help) ]]; then
        if ((CURRENT == 3)); then
            [[ $command == data ]] && _describe verb verbs || _describe command commands
            return
        fi
        [[ $command == data ]] && command="data $words[3]" || command=$words[3]
        shift words
        ((CURRENT--))
    fi
    shift words
    ((CURRENT--))
    case $command in
@CASES@
    esac
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _meshwright "$@"
else
    compdef _meshwright meshwright
fi
