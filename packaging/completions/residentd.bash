# SPDX-License-Identifier: MIT
# bash completion for residentd(8)

_residentd()
{
	local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}

	COMPREPLY=()
	case $prev in
	--model) mapfile -t COMPREPLY < <(compgen -f -X '!*.gguf' -- "$cur"; compgen -d -- "$cur") ;;
	--socket | --config) mapfile -t COMPREPLY < <(compgen -f -- "$cur") ;;
	--threads | --context) ;;
	--vram) mapfile -t COMPREPLY < <(compgen -W 'auto off' -- "$cur") ;;
	*)
		mapfile -t COMPREPLY < <(compgen -W '--model --socket --config --threads --context --vram --version --help' -- "$cur")
		;;
	esac
}
complete -F _residentd residentd
