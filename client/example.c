/* SPDX-License-Identifier: MIT */
/* Asks the machine's model one question: cc example.c $(pkg-config --cflags --libs libresident) */
#include <resident.h>
#include <stdio.h>

static int print(struct resident *r, const struct resident_event *event, void *userdata)
{
	(void)r, (void)userdata;
	if (event->type == RESIDENT_EVENT_ANSWER)
		fwrite(event->text, 1, event->text_len, stdout);
	return fflush(stdout);
}

int main(int argc, char **argv)
{
	const char *text = argc > 1 ? argv[1] : "Say hello.";
	struct resident_message question = { .role = "user", .content = text };
	struct resident *r;
	int e = resident_connect(NULL, &r);

	if (e < 0) {
		fprintf(stderr, "%s: %s\n", resident_socket_path(), resident_strerror(e));
		return 1;
	}
	e = resident_chat(r, &question, 1, NULL, print, NULL);
	if (e == 0)
		e = resident_wait(r, -1);
	if (e < 0)
		fprintf(stderr, "%s\n", resident_last_error(r)->message);
	resident_close(r);
	return e < 0;
}
