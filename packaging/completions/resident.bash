# SPDX-License-Identifier: MIT
# bash completion for resident(1)

_resident()
{
	local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}

	COMPREPLY=()
	case $prev in
	--think)
		mapfile -t COMPREPLY < <(compgen -W 'off' -- "$cur")
		return
		;;
	--want)
		mapfile -t COMPREPLY < <(compgen -W 'chat code small best' -- "$cur")
		return
		;;
	-s | --system | --max-tokens | -t | --temperature | --top-k | --top-p | --min-p | --seed | --stop) return ;;
	esac
	case $cur in
	-*)
		mapfile -t COMPREPLY < <(compgen -W '--continue --system --no-save --think --show-thinking --max-tokens
			--temperature --top-k --top-p --min-p --seed --stop --want --complete --json --raw --help --version' -- "$cur")
		;;
	*) [ "$COMP_CWORD" -ne 1 ] || mapfile -t COMPREPLY < <(compgen -W 'forget' -- "$cur") ;;
	esac
}
complete -F _resident resident
