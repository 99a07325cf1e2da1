/* SPDX-License-Identifier: MIT */
/*
 * template-chatml.c: the dialects whose turns are <|im_start|>role ... <|im_end|>: Qwen's and
 * their relatives'. See template-internal.h.
 *
 * A dialect is taken only when the whole text of the model's template, without the whitespace that
 * Jinja drops, fits its pattern; gaps stand only where the text is not reached without tools or
 * images. So what is rendered is what Jinja would render.
 */
#include "daemon/model/template-internal.h"

/* clang-format off */
#define LAST_QUERY     "{%-setns=namespace(multi_step_tool=true,last_query_index=messages|length-1)%}" \
		       "{%-formessageinmessages[::-1]%}{%-setindex=(messages|length-1)-loop.index0%}"
#define IS_QUERY(c)    "not(" c ".startswith('<tool_response>')and" c ".endswith('</tool_response>'))%}" \
		       "{%-setns.multi_step_tool=false%}{%-setns.last_query_index=index%}{%-endif%}"
#define TURN(c)	       "{{-'<|im_start|>'+message.role+'\\n'+" c "+'<|im_end|>'+'\\n'}}"
#define HEADER_CONTENT "{{-'<|im_start|>'+message.role+'\\n'+content}}"
#define SYSTEM_TURN(c) "{{-'<|im_start|>system\\n'+" c "+'<|im_end|>\\n'}}"
#define GENERATE       "{%-ifadd_generation_prompt%}{{-'<|im_start|>assistant\\n'}}"
#define THINK_OFF      "{{-'<think>\\n\\n</think>\\n\\n'}}"
#define THINK_OFF_ON   "{%-ifenable_thinkingisdefinedandenable_thinkingisfalse%}" THINK_OFF \
		       "{%-else%}{{-'<think>\\n'}}{%-endif%}"
#define TOOL_TURNS     "{%-elifmessage.role=='tool'%}*{%-endfor%}"

#define Q35_START   "{%-setimage_count=namespace(value=0)%}{%-setvideo_count=namespace(value=0)%}" \
		    "{%-macrorender_content(content,do_vision_count,is_system_content=false)%}" \
		    "{%-ifcontentisstring%}{{-content}}{%-elif*{%-endmacro%}" \
		    "{%-ifnotmessages%}{{-raise_exception('No messages provided.')}}{%-endif%}"
#define Q35_TOOLS   "{%-iftoolsandtoolsisiterableandtoolsisnotmapping%}*{{-'<|im_end|>\\n'}}{%-else%}"
#define Q35_QUERY   LAST_QUERY "{%-ifns.multi_step_toolandmessage.role=='user'%}" \
		    "{%-setcontent=render_content(message.content,false)|trim%}{%-if" IS_QUERY("content") "{%-endif%}{%-endfor%}"
#define Q35_CONTENT "{%-setcontent=render_content(message.content,true)|trim%}"
#define Q35_TURNS   "message.role=='user'%}" TURN("content") "{%-elifmessage.role=='assistant'%}{%-setreasoning_content=''%}" \
		    "{%-ifmessage.reasoning_contentisstring%}{%-setreasoning_content=message.reasoning_content%}{%-else%}" \
		    "{%-if'</think>'incontent%}{%-setreasoning_content=content.split('</think>')[0].rstrip('\\n')" \
		    ".split('<think>')[-1].lstrip('\\n')%}{%-setcontent=content.split('</think>')[-1].lstrip('\\n')%}" \
		    "{%-endif%}{%-endif%}{%-setreasoning_content=reasoning_content|trim%}" \
		    "{%-if" EITHER("loop.index0>ns.last_query_index%}", \
				   "(preserve_thinkingisdefinedandpreserve_thinkingistrue)or" \
				   "(loop.index0>ns.last_query_index)%}") \
		    "{{-'<|im_start|>'+message.role+'\\n<think>\\n'+reasoning_content+'\\n</think>\\n\\n'+content}}{%-else%}" \
		    HEADER_CONTENT "{%-endif%}" \
		    "{%-ifmessage.tool_callsandmessage.tool_callsisiterableandmessage.tool_callsisnotmapping%}*" \
		    "{%-endif%}{{-'<|im_end|>\\n'}}" TOOL_TURNS
/* The small sizes do not think unless asked, the large ones do: the same to us, who always say. */
#define Q35_GENERATE GENERATE EITHER(THINK_OFF_ON, \
				     "{%-ifenable_thinkingisdefinedandenable_thinkingistrue%}{{-'<think>\\n'}}{%-else%}" \
				     THINK_OFF "{%-endif%}") "{%-endif%}"

/* What all of them write. */
#define CHATML                                                    \
	.specials = { "<|im_start|>", "<|im_end|>" },             \
	.system = { "<|im_start|>system\n", "<|im_end|>\n" },     \
	.user = { "<|im_start|>user\n", "<|im_end|>\n" },         \
	.assistant = { "<|im_start|>assistant\n", "<|im_end|>\n" }

static const struct dialect dialects[] = {
	{
		.name = "qwen3.5", /* also Qwen3.6, which adds preserve_thinking (never set by us) */
		.pattern = Q35_START Q35_TOOLS
			"{%-ifmessages[0].role=='system'%}{%-setcontent=render_content(messages[0].content,false,true)|trim%}"
			SYSTEM_TURN("content") "{%-endif%}{%-endif%}" Q35_QUERY
			"{%-ifns.multi_step_tool%}{{-raise_exception('No user query found in messages.')}}{%-endif%}"
			"{%-formessageinmessages%}" Q35_CONTENT "{%-ifmessage.role=='system'%}{%-ifnotloop.first%}"
			"{{-raise_exception('System message must be at the beginning.')}}{%-endif%}{%-elif" Q35_TURNS Q35_GENERATE,
		CHATML, .history = HISTORY_QWEN35, .trim = true,
		.think_on = "<think>\n", .think_off = "<think>\n\n</think>\n\n",
	},
	{
		.name = "qwen3.5-merged", /* a common repair: system messages are merged and may be empty */
		.pattern = Q35_START
			"{%-setnum_sys=0%}{%-setmerged_system=''%}{%-ifmessages[0].role=='system'ormessages[0].role=='developer'%}"
			"{%-setfirst=render_content(messages[0].content,false,true)|trim%}*"
			"{%-else%}{%-setmerged_system=first%}{%-setnum_sys=1%}{%-endif%}{%-endif%}" Q35_TOOLS
			"{%-ifmerged_system%}" SYSTEM_TURN("merged_system") "{%-endif%}{%-endif%}" Q35_QUERY
			"{%-formessageinmessages%}"
			"{%-ifloop.index0>=num_sysandmessage.role!='system'andmessage.role!='developer'%}" Q35_CONTENT
			"{%-if" Q35_TURNS Q35_GENERATE,
		CHATML, .history = HISTORY_QWEN35, .trim = true, .system_rule = SYSTEM_SKIP_EMPTY,
		.think_on = "<think>\n", .think_off = "<think>\n\n</think>\n\n",
	},
	{
		.name = "qwen3", /* the model opens its think block itself */
		.pattern = "{%-iftools%}*<|im_end|>\\n'}}{%-else%}{%-ifmessages[0].role=='system'%}"
			SYSTEM_TURN("messages[0].content") "{%-endif%}{%-endif%}" LAST_QUERY
			"{%-ifns.multi_step_toolandmessage.role=='user'and" IS_QUERY("message.content") "{%-endfor%}"
			"{%-formessageinmessages%}{%-if(message.role=='user')or(message.role=='system'andnotloop.first)%}"
			TURN("message.content") "{%-elifmessage.role=='assistant'%}{%-setcontent=message.content%}"
			"{%-setreasoning_content=''%}"
			"{%-ifmessage.reasoning_contentisdefinedandmessage.reasoning_contentisnotnone%}"
			"{%-setreasoning_content=message.reasoning_content%}{%-else%}{%-if'</think>'inmessage.content%}"
			"{%-setcontent=message.content.split('</think>')[-1].lstrip('\\n')%}"
			"{%-setreasoning_content=message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n')%}"
			"{%-endif%}{%-endif%}{%-ifloop.index0>ns.last_query_index%}"
			"{%-ifloop.lastor(notloop.lastandreasoning_content)%}{{-'<|im_start|>'+message.role+'\\n<think>\\n'"
			"+reasoning_content.strip('\\n')+'\\n</think>\\n\\n'+content.lstrip('\\n')}}{%-else%}" HEADER_CONTENT
			"{%-endif%}{%-else%}" HEADER_CONTENT "{%-endif%}{%-ifmessage.tool_calls%}*{%-endif%}{{-'<|im_end|>\\n'}}"
			TOOL_TURNS GENERATE
			"{%-ifenable_thinkingisdefinedandenable_thinkingisfalse%}" THINK_OFF "{%-endif%}{%-endif%}",
		CHATML, .history = HISTORY_QWEN3, .think_on = "", .think_off = "<think>\n\n</think>\n\n",
	},
	{
		.name = "qwen2.5", /* and others that differ in the default system turn only */
		.default_system = PUT_FIRST,
		.pattern = "{%-iftools%}*<|im_end|>\\n'}}{%-else%}{%-ifmessages[0]['role']=='system'%}"
			SYSTEM_TURN("messages[0]['content']") "{%-else%}{{-'<|im_start|>system\\n@<|im_end|>\\n'}}{%-endif%}{%-endif%}"
			"{%-formessageinmessages%}{%-if(message.role=='user')or(message.role=='system'andnotloop.first)"
			"or(message.role=='assistant'andnotmessage.tool_calls)%}" TURN("message.content")
			"{%-elifmessage.role=='assistant'%}*" TOOL_TURNS GENERATE "{%-endif%}",
		CHATML, .history = HISTORY_PLAIN, .think_on = "", .think_off = "",
	},
	{
		.name = "qwq",
		.pattern = "{%-iftools%}*<|im_end|>\\n'}}{%-else%}{%-ifmessages[0]['role']=='system'%}"
			SYSTEM_TURN("messages[0]['content']") "{%-endif%}{%-endif%}"
			"{%-formessageinmessages%}{%-if(message.role=='user')or(message.role=='system'andnotloop.first)%}"
			TURN("message.content") "{%-elifmessage.role=='assistant'andnotmessage.tool_calls%}"
			"{%-setcontent=message.content%}{%-ifnotloop.last%}"
			"{%-setcontent=message.content.split('</think>')[-1].lstrip('\\n')%}{%-endif%}" TURN("content")
			"{%-elifmessage.role=='assistant'%}*" TOOL_TURNS
			"{%-ifadd_generation_prompt%}{{-'<|im_start|>assistant\\n<think>\\n'}}{%-ifnotenable_thinking-%}"
			"{{-'</think>'-}}{%-endif-%}{%-endif%}",
		CHATML, .history = HISTORY_STRIP_OLD, .think_on = "<think>\n", .think_off = "<think>\n</think>",
	},
	{
		.name = "qwen3-coder",
		.pattern = "{%macrorender_extra_keys(json_dict,handled_keys)%}*{%endmacro%}{%-ifmessages[0]['role']=='system'%}"
			"{%-setsystem_message=messages[0]['content']%}{%-setloop_messages=messages[1:]%}{%-else%}"
			"{%-setloop_messages=messages%}{%-endif%}{%-ifnottoolsisdefined%}{%-settools=[]%}{%-endif%}"
			"{%-ifsystem_messageisdefined%}{{-'<|im_start|>system\\n'+system_message}}{%-else%}"
			"{%-iftoolsisiterableandtools|length>0%}*{%-ifsystem_messageisdefined%}{{-'<|im_end|>\\n'}}{%-else%}"
			"{%-iftoolsisiterableandtools|length>0%}{{-'<|im_end|>\\n'}}{%-endif%}{%-endif%}"
			"{%-formessageinloop_messages%}{%-ifmessage.role=='assistant'andmessage.tool_callsisdefinedand*"
			"{%-elifmessage.role=='user'ormessage.role=='system'ormessage.role=='assistant'%}" TURN("message.content")
			TOOL_TURNS GENERATE "{%-endif%}",
		CHATML, .history = HISTORY_PLAIN, .think_on = "", .think_off = "",
	},
	{
		.name = "chatml-think", /* a loop over turns that drops old thoughts */
		.pattern = "{%-forminmessages%}{{-'<|im_start|>'+m.role+'\\n'}}{%-settext=m.contentifm.contentisstringelse*%}"
			"{%-ifm.role=='assistant'and'</think>'intext%}{%settext=text.split('</think>')[-1].lstrip('\\n')%}{%endif%}"
			"{{-text+'<|im_end|>\\n'}}{%-endfor%}" GENERATE THINK_OFF_ON "{%-endif%}",
		CHATML, .history = HISTORY_STRIP, .think_on = "<think>\n", .think_off = "<think>\n\n</think>\n\n",
	},
	{
		/* Always opens a think block. Closing it at once is what a budget of 0 does as
		 * well, so "off" may do it. */
		.name = "chatml-always-think",
		.pattern = "{%-forminmessages%}{{-'<|im_start|>'+m.role+'\\n'+m.content+'<|im_end|>\\n'}}{%-endfor%}"
			"{%-ifadd_generation_prompt%}{{-'<|im_start|>assistant\\n<think>\\n'}}{%-endif%}",
		CHATML, .history = HISTORY_PLAIN, .think_on = "<think>\n", .think_off = "<think>\n\n</think>\n\n",
	},
	{
		.name = "chatml",
		.pattern = "{%formessageinmessages%}{{'<|im_start|>'+message['role']+'\\n'+message['content']+'<|im_end|>'+'\\n'}}"
			"{%endfor%}{%ifadd_generation_prompt%}{{'<|im_start|>assistant\\n'}}{%endif%}",
		CHATML, .history = HISTORY_PLAIN, .think_on = "", .think_off = "",
	},
	{
		.name = "smollm3",
		.pattern = "{%-ifenable_thinkingisnotdefined-%}{%-setenable_thinking=true-%}{%-endif-%}"
			"{%-ifenable_thinking-%}{%-setreasoning_mode='/think'-%}{%-else-%}{%-setreasoning_mode='/no_think'-%}{%-endif-%}"
			"{{-'<|im_start|>system\\n'-}}{%-ifmessages[0].role=='system'-%}{%-setsystem_message=messages[0].content-%}"
			"{%-if'/no_think'insystem_message-%}{%-setreasoning_mode='/no_think'-%}"
			"{%-elif'/think'insystem_message-%}{%-setreasoning_mode='/think'-%}{%-endif-%}"
			"{%-setcustom_instructions=system_message.replace('/no_think','')-%}"
			"{%-setcustom_instructions=custom_instructions.replace('/think','')-%}"
			"{%-setcustom_instructions=custom_instructions.rstrip()-%}{%-endif-%}"
			"{{-'## Metadata\\n\\n'-}}{{-'Knowledge Cutoff Date: June 2025\\n'-}}"
			"{{-'Reasoning Mode: '+reasoning_mode+'\\n\\n'-}}{{-'## Custom Instructions\\n\\n'-}}"
			"{%-ifcustom_instructions-%}{{-custom_instructions+'\\n\\n'-}}"
			"{%-elifreasoning_mode=='/think'-%}{{-'" LITERAL "'-}}{%-else-%}{{-'" LITERAL "'-}}{%-endif-%}{{-'<|im_end|>\\n'-}}"
			"{%-formessageinmessages-%}{%-setcontent=message.contentifmessage.contentisstringelse''-%}"
			"{%-ifmessage.role=='user'-%}{{'<|im_start|>'+message.role+'\\n'+content+'<|im_end|>\\n'}}"
			"{%-elifmessage.role=='assistant'-%}{%-ifreasoning_mode=='/think'-%}"
			"{{'<|im_start|>assistant\\n'+content.lstrip('\\n')+'<|im_end|>\\n'}}{%-else-%}"
			"{{'<|im_start|>assistant\\n'+'<think>\\n\\n</think>\\n'+content.lstrip('\\n')+'<|im_end|>\\n'}}{%-endif-%}"
			"{%-elifmessage.role=='tool'-%}*{%-endif-%}{%-endfor-%}"
			"{%-ifadd_generation_prompt-%}{%-ifreasoning_mode=='/think'-%}{{'<|im_start|>assistant\\n'}}{%-else-%}"
			"{{'<|im_start|>assistant\\n'+'<think>\\n\\n</think>\\n'}}{%-endif-%}{%-endif-%}",
		CHATML, .history = HISTORY_SMOLLM3, .system_rule = SYSTEM_SMOLLM3,
		.think_on = "", .think_off = "<think>\n\n</think>\n", .keeps_think_off = true,
	},
};
/* clang-format on */

const struct dialect *template_chatml(size_t i)
{
	return i < ARRAY_SIZE(dialects) ? &dialects[i] : NULL;
}
