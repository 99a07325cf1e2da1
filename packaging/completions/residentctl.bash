# SPDX-License-Identifier: MIT
# bash completion for residentctl(1)

_residentctl_keys='Allow= Weight= Sessions= QueueMax= TokensPerDay= KvBytesMax= ContextMax= Class= PauseIdle= MaxThinkingTokens= Models='

# The words before the cursor that are no options, up to a "--"; the index of what follows that.
_residentctl_words()
{
	local i

	words=() command=0
	for ((i = 1; i < COMP_CWORD; i++)); do
		case ${COMP_WORDS[i]} in
		--)
			command=$((i + 1))
			return
			;;
		--who | --why | --bytes | --root | --name | --svg | --output | --tokens | --interval | --trace | --experts | \
			--fraction | --policy | --skip | --shape | --vram | --ram | --vram-bw | --pcie | --mem | --disk | --flops | \
			--context | --csv | --repeat) ((i++)) ;;
		-*) ;;
		*) words+=("${COMP_WORDS[i]}") ;;
		esac
	done
}

_residentctl()
{
	local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} words command list=

	COMPREPLY=()
	_residentctl_words
	if [ "$command" -gt 0 ]; then
		[ "$command" -ne "$COMP_CWORD" ] || mapfile -t COMPREPLY < <(compgen -c -- "$cur")
		[ "$command" -eq "$COMP_CWORD" ] || compopt -o default 2>/dev/null
		return
	fi
	case $prev in
	--root)
		mapfile -t COMPREPLY < <(compgen -d -- "$cur")
		return
		;;
	--svg | --csv | --output | --trace)
		mapfile -t COMPREPLY < <(compgen -f -- "$cur")
		return
		;;
	--shape)
		mapfile -t COMPREPLY < <(compgen -W qwen35moe-35b-a3b-q4_k_m -- "$cur")
		return
		;;
	--who | --why | --bytes | --name | --tokens | --interval | --experts | --fraction | --policy | --skip | --vram | --ram | \
		--vram-bw | --pcie | --mem | --disk | --flops | --context | --repeat) return ;;
	esac
	if [[ $cur == -* ]]; then
		list='--json --help --version'
		case "${words[0]} ${words[1]}" in
		'hold '*) list+=' --who --why' ;;
		'yield-gpu '*) list+=' --who --why --bytes' ;;
		'model add') list+=' --default --name' ;;
		'model remove') list+=' --force' ;;
		'model load') list+=' --default' ;;
		'policy set') list+=' --runtime' ;;
		'policy show' | 'policy check' | 'config check') list+=' --root' ;;
		'residency '*) list+=' --svg' ;;
		'top '*) list+=' --interval --once' ;;
		'trace record') list+=' --output --tokens --force' ;;
		'bench '*) list+=' --context --tokens --repeat --csv --svg' ;;
		'simulate '*) list+=' --trace --experts --fraction --policy --skip' ;;
		'plan '*) list+=' --vram --ram --mem --disk --pcie --vram-bw --flops --context --trace --shape' ;;
		'tokenize '*) list+=' --special' ;;
		esac
		mapfile -t COMPREPLY < <(compgen -W "$list" -- "$cur")
		return
	fi
	case ${#words[@]}:${words[0]}:${words[1]} in
	0:*) list='status availability usage sessions holds hold yield-gpu model policy config residency top trace bench simulate plan reload tokenize interface' ;;
	1:model:) list='list add show default remove load unload' ;;
	1:policy:) list='show set check' ;;
	1:config:) list='check' ;;
	1:trace:) list='record' ;;
	1:plan: | 2:model:add | 2:model:show) mapfile -t COMPREPLY < <(compgen -f -X '!*.gguf' -- "$cur"; compgen -d -- "$cur") ;;
	2:policy:show | 2:policy:set) mapfile -t COMPREPLY < <(compgen -u -- "$cur") ;;
	[3-9]:policy:set)
		compopt -o nospace 2>/dev/null
		list=$_residentctl_keys
		;;
	esac
	[ -z "$list" ] || mapfile -t COMPREPLY < <(compgen -W "$list" -- "$cur")
}
complete -F _residentctl residentctl
