/* SPDX-License-Identifier: MIT */
/*
 * template-families.c: the dialects of Llama 3, Mistral and DeepSeek-R1's distillates. See
 * template-internal.h, and template-chatml.c for what a pattern promises.
 */
#include "daemon/model/template-internal.h"

/* clang-format off */
#define LLAMA_HEADER(role) "<|start_header_id|>" role "<|end_header_id|>\n\n"
#define LLAMA_START "{{-bos_token}}{%-ifcustom_toolsisdefined%}{%-settools=custom_tools%}{%-endif%}" \
		    "{%-ifnottools_in_user_messageisdefined%}{%-settools_in_user_message=true%}{%-endif%}" \
		    "{%-ifnotdate_stringisdefined%}"
/* Where the template is asked for today's date, the one that it falls back to is taken, as in the older ones. */
#define LLAMA_DATE  EITHER("{%-setdate_string='", "{%-ifstrftime_nowisdefined%}{%-setdate_string=strftime_now('%d %b %Y')%}" \
			   "{%-else%}{%-setdate_string='") "@'%}" \
		    EITHER("{%-endif%}{%-endif%}{%-ifnottools", "{%-endif%}{%-ifnottools")

#define MISTRAL_TURNS "{%-if(message['role']=='user')!=(ns.index%2==0)%}" \
		    "{{-raise_exception('After the optional system message, conversation roles must alternate " \
		    "user/assistant/user/assistant/...')}}{%-endif%}{%-setns.index=ns.index+1%}{%-endif%}{%-endfor%}"
#define MISTRAL_USERS "{%-setuser_messages=loop_messages|selectattr('role','equalto','user')|list%}"
#define MISTRAL_SYSTEM(c) "{{-'[SYSTEM_PROMPT]'+" c "+'[/SYSTEM_PROMPT]'}}"
#define MISTRAL_LATE_SYSTEM "message['role']=='system'%}{%-ifmessage['content']isstring%}" MISTRAL_SYSTEM("message['content']") \
		    "{%-else%}" MISTRAL_SYSTEM("message['content'][0]['text']") "{%-endif%}"
#define NO_TOOLS    "{%-ifnottoolsisdefined%}{%-settools=none%}{%-endif%}"

#define R1_START    "{%ifnotadd_generation_promptisdefined-%}{%-setadd_generation_prompt=false-%}{%-endif-%}" \
		    "{%-setns=namespace(is_first=false,is_tool=false,is_output_first=true,system_prompt='')-%}" \
		    "{%-formessageinmessages-%}{%-ifmessage['role']=='system'-%}{%-setns.system_prompt=message['content']-%}" \
		    "{%-endif-%}{%-endfor-%}{{bos_token}}{{ns.system_prompt}}{%-formessageinmessages-%}" \
		    "{%-ifmessage['role']=='user'-%}{%-setns.is_tool=false-%}{{'<｜User｜>'+message['content']}}{%-endif-%}" \
		    "{%-ifmessage['role']=='assistant'and" \
		    EITHER("message['content']isnone-%}", "message['tool_calls']-%}") "*{%-endif-%}" \
		    "{%-ifmessage['role']=='assistant'andmessage['content']isnotnone-%}{%-ifns.is_tool-%}*{%-else-%}" \
		    "{%-setcontent=message['content']-%}{%-if'</think>'incontent-%}{%-setcontent=content.split('</think>')[-1]-%}" \
		    "{%-endif-%}{{'<｜Assistant｜>'+content+'<｜end▁of▁sentence｜>'}}{%-endif-%}{%-endif-%}" \
		    "{%-ifmessage['role']=='tool'-%}*{%-endfor-%}{%-ifns.is_tool-%}*{%-endif-%}" \
		    "{%-ifadd_generation_promptandnotns.is_tool-%}{{'<｜Assistant｜><think>\\n'}}"

/* What the dialects of a family write. */
#define LLAMA                                                                        \
	.specials = { "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>" },    \
	.user = { LLAMA_HEADER("user"), "<|eot_id|>" },                              \
	.assistant = { LLAMA_HEADER("assistant"), "<|eot_id|>" }
#define MISTRAL                                                                      \
	.specials = { "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", PUT_EOS }, \
	.system = { "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]" },                         \
	.user = { "[INST]", "[/INST]" }, .assistant = { "", PUT_EOS }
#define R1                                                                           \
	.specials = { "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>" },            \
	.system = { "", "" }, .user = { "<｜User｜>", "" },                            \
	.assistant = { "<｜Assistant｜>", "<｜end▁of▁sentence｜>" },                       \
	.history = HISTORY_AFTER, .think_on = "<think>\n"

static const struct dialect dialects[] = {
	{
		.name = "llama-3", /* 3.1, 3.2 and 3.3 */
		.pattern = LLAMA_START LLAMA_DATE "isdefined%}{%-settools=none%}{%-endif%}{%-ifmessages[0]['role']=='system'%}"
			"{%-setsystem_message=messages[0]['content']|trim%}{%-setmessages=messages[1:]%}{%-else%}"
			"{%-setsystem_message=''%}{%-endif%}{{-'<|start_header_id|>system<|end_header_id|>\\n\\n'}}"
			EITHER("{%-ifbuiltin_toolsisdefinedortoolsisnotnone%}", "{%-iftoolsisnotnone%}")
			"{{-'Environment: ipython\\n'}}{%-endif%}"
			EITHER("{%-ifbuiltin_toolsisdefined%}{{-'Tools: '+builtin_tools|reject('equalto','code_interpreter')"
			       "|join(', ')+'\\n\\n'}}{%-endif%}", "")
			"{{-'Cutting Knowledge Date: December 2023\\n'}}{{-'Today Date: '+date_string+'\\n\\n'}}"
			"{%-iftoolsisnotnoneandnottools_in_user_message%}*{%-endif%}{{-system_message}}{{-'<|eot_id|>'}}"
			"{%-iftools_in_user_messageandnottoolsisnone%}*{{-first_user_message+'<|eot_id|>'}}{%-endif%}"
			"{%-formessageinmessages%}"
			"{%-ifnot(message.role=='ipython'ormessage.role=='tool'or'tool_calls'inmessage)%}"
			"{{-'<|start_header_id|>'+message['role']+'<|end_header_id|>\\n\\n'+message['content']|trim+'<|eot_id|>'}}"
			"{%-elif'tool_calls'inmessage%}*{%-endif%}{%-endfor%}"
			"{%-ifadd_generation_prompt%}{{-'<|start_header_id|>assistant<|end_header_id|>\\n\\n'}}{%-endif%}",
		LLAMA, .system = { LLAMA_HEADER("system") "Cutting Knowledge Date: December 2023\n"
				   "Today Date: " PUT_FIRST "\n\n", "<|eot_id|>" },
		.system_rule = SYSTEM_ALWAYS, .trim = true, .bos = true, .think_on = "", .think_off = "",
	},
	{
		.name = "mistral-nemo",
		.pattern = "{%-ifmessages[0]['role']=='system'%}{%-setsystem_message=messages[0]['content']%}"
			"{%-setloop_messages=messages[1:]%}{%-else%}{%-setloop_messages=messages%}{%-endif%}" NO_TOOLS MISTRAL_USERS
			"{%-setns=namespace()%}{%-setns.index=0%}{%-formessageinloop_messages%}"
			"{%-ifnot(message.role=='tool'ormessage.role=='tool_results'"
			"or(message.tool_callsisdefinedandmessage.tool_callsisnotnone))%}" MISTRAL_TURNS
			"{{-bos_token}}{%-formessageinloop_messages%}{%-ifmessage['role']=='user'%}"
			"{%-iftoolsisnotnoneand(message==user_messages[-1])%}*{{-'[/AVAILABLE_TOOLS]'}}{%-endif%}"
			"{%-ifloop.lastandsystem_messageisdefined%}*{%-else%}{{-'[INST]'+message['content']+'[/INST]'}}{%-endif%}"
			"{%-elif(message.tool_callsisdefinedandmessage.tool_callsisnotnone)%}*"
			"{%-elifmessage['role']=='assistant'%}{{-message['content']+eos_token}}"
			"{%-elifmessage['role']=='tool_results'ormessage['role']=='tool'%}*{%-endfor%}",
		.specials = { "[INST]", "[/INST]", PUT_EOS }, .user = { "[INST]", "[/INST]" }, .assistant = { "", PUT_EOS },
		.system_rule = SYSTEM_REFUSED, .alternate = true, .bos = true, .think_on = "", .think_off = "",
	},
	{
		.name = "mistral-small", /* its default system turn says today's date */
		.pattern = "{%-settoday=strftime_now('%Y-%m-%d')%}{%-setdefault_system_message='" LITERAL "'+today+'" LITERAL "'%}"
			"{{-bos_token}}{%-setsystem_prompt=default_system_message%}{%-setloop_messages=messages%}" NO_TOOLS
			"{%-ifmessages|length>0andmessages[0]['role']=='system'%}{%-ifmessages[0]['content']isstring%}"
			"{%-setsystem_prompt=messages[0]['content']%}{%-else%}{%-setsystem_prompt=messages[0]['content'][0]['text']%}"
			"{%-endif%}{%-setloop_messages=messages[1:]%}{%-endif%}" MISTRAL_USERS
			"{%-setns=namespace(index=0)%}{%-formessageinloop_messages%}"
			"{%-ifnot(message.role=='tool'or(message.get('tool_calls')))%}" MISTRAL_TURNS MISTRAL_SYSTEM("system_prompt")
			"{%-formessageinloop_messages%}{%-if" MISTRAL_LATE_SYSTEM "{%-elifmessage['role']=='user'%}"
			"{%-iftoolsisnotnoneand(message==user_messages[-1])%}*{%-endif%}{{-'[INST]'}}"
			"{%-ifmessage['content']isstring%}{{-message['content']}}{%-else%}*{%-endif%}{{-'[/INST]'}}"
			"{%-elifmessage['role']=='assistant'%}{%-ifmessage.get('tool_calls')%}*"
			"{%-elifmessage['content']isstring%}{{-message['content']+eos_token}}{%-else%}*"
			"{%-elifmessage['role']=='tool_results'ormessage['role']=='tool'%}*{%-endfor%}",
		MISTRAL, .default_system = PUT_FIRST PUT_DATE PUT_SECOND,
		.alternate = true, .bos = true, .think_on = "", .think_off = "",
	},
	{
		.name = "devstral",
		.pattern = "{%-setdefault_system_message='" LITERAL "'%}{{-bos_token}}{%-ifmessages[0]['role']=='system'%}"
			"{%-ifmessages[0]['content']isstring%}{%-setsystem_message=messages[0]['content']%}{%-else%}"
			"{%-setsystem_message=messages[0]['content'][0]['text']%}{%-endif%}{%-setloop_messages=messages[1:]%}{%-else%}"
			"{%-setsystem_message=default_system_message%}{%-setloop_messages=messages%}{%-endif%}"
			MISTRAL_SYSTEM("system_message") "{%-settools_description=''%}{%-sethas_tools=false%}"
			"{%-iftoolsisdefinedandtoolsisnotnoneandtools|length>0%}*{{-tools_description}}{%-endif%}"
			"{%-formessageinloop_messages%}{%-ifmessage['role']=='user'%}{%-ifmessage['content']isstring%}"
			"{{-'[INST]'+message['content']+'[/INST]'}}{%-else%}*{%-elif" MISTRAL_LATE_SYSTEM
			"{%-elifmessage['role']=='assistant'%}{%-ifmessage['content']isstring%}{{-message['content']}}{%-else%}"
			"{{-message['content'][0]['text']}}{%-endif%}"
			"{%-ifmessage['tool_calls']isdefinedandmessage['tool_calls']isnotnone%}*{%-endif%}{{-eos_token}}"
			"{%-elifmessage['role']=='tool_results'ormessage['role']=='tool'%}*{%-endfor%}",
		MISTRAL, .default_system = PUT_FIRST, .bos = true, .think_on = "", .think_off = "",
	},
	{
		.name = "deepseek-r1-qwen",
		.pattern = R1_START "{%ifnotenable_thinking%}{{-'</think>'-}}{%endif%}{%-endif%}",
		R1, .bos = true, .think_off = "<think>\n</think>",
	},
	{
		.name = "deepseek-r1", /* always opens a think block, see chatml-always-think */
		.pattern = R1_START "{%-endif%}",
		R1, .bos = true, .think_off = "<think>\n\n</think>\n\n",
	},
};
/* clang-format on */

const struct dialect *template_family(size_t i)
{
	return i < ARRAY_SIZE(dialects) ? &dialects[i] : NULL;
}
