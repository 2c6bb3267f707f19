# Completion of meshwright for fish:  @HOW@
function __meshwright_is
    set -l words (commandline -opc)
    test "$words[2]" = help; and set -e words[2]
    test "$words[2]" = "$argv[1]"; or return 1
    test (count $argv) -lt 2; or test "$words[3]" = "$argv[2]"
end
function __meshwright_words
    test (count (commandline -opc)) -eq $argv[1]
end
complete -c meshwright -f
@LINES@
