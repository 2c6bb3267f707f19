# Completion of meshwright for bash:  @HOW@
_meshwright() {
    local cur=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} first=2 i word
    local flag= gap=0 flags= bare= kind= many= IFS=$' \t\n'
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "@COMMANDS@ --help --version" -- "$cur"))
        return
    fi
    case $command in
        help | data)
            if [[ $COMP_CWORD -eq 2 ]]; then
                local known="@COMMANDS@"
                [[ $command == data ]] && known="@VERBS@"
                COMPREPLY=($(compgen -W "$known" -- "$cur"))
                return
            fi
            [[ $command == data ]] && command="data ${COMP_WORDS[2]}" || command=${COMP_WORDS[2]}
            first=3
            ;;
        launch)
            for ((i = 2; i < COMP_CWORD; i++)); do
                case ${COMP_WORDS[i]} in @LAUNCHED@) command=${COMP_WORDS[i]} first=$((i + 1)) ;; esac
            done
            ;;
    esac
    [[ $cur == "=" ]] && cur=
    for ((i = first; i < COMP_CWORD; i++)); do # the nearest flag before the cursor; bash splits --flag=value
        word=${COMP_WORDS[i]}
        case $word in
            =) ;;
            --*) flag=$word gap=0 ;;
            *) gap=$((gap + 1)) ;;
        esac
    done
    case $command in
@CASES@
    esac
    [[ " $many " == *" $flag "* ]] && gap=0
    [[ -n $kind && $gap -eq 0 && $cur != --* ]] || kind=
    if [[ -z $kind && ( $cur == -* || -z $bare ) ]]; then
        COMPREPLY=($(compgen -W "$flags --help --help-all" -- "$cur"))
        return
    fi
    case ${kind:-$bare} in
        any) ;;
        dirs | files | prefixes)
            IFS=$'\n'
            compopt -o filenames 2>/dev/null
            if [[ ${kind:-$bare} == dirs ]]; then
                COMPREPLY=($(compgen -d -- "$cur"))
            elif [[ ${kind:-$bare} == files ]]; then
                COMPREPLY=($(compgen -f -- "$cur"))
            else # of token files only the common beginning
                COMPREPLY=($(compgen -f -- "$cur" | sed -e 's/\.bin$//' -e 's/\.idx$//' | sort -u))
            fi
            ;;
        *) COMPREPLY=($(compgen -W "${kind:-$bare}" -- "$cur")) ;;
    esac
}
complete -F _meshwright meshwright
