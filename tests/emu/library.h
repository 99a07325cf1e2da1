/* SPDX-License-Identifier: MIT */
/* library.h: where the emulator's library of this build is: for unit tests, which lie beside it. */
#pragma once

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* NULL: it was not built. Valid until the next call. */
static inline const char *emu_library(void)
{
	static char path[4096];
	ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 64);
	char *slash;

	/* DIR/tests/unit/test-NAME -> DIR/tests/libcuda-emu.so */
	for (int i = 0; i < 2; i++) {
		if (n <= 0)
			return NULL;
		path[n] = '\0';
		slash = strrchr(path, '/');
		n = slash ? slash - path : -1;
	}
	if (n <= 0)
		return NULL;
	strcpy(path + n, "/libcuda-emu.so");
	return access(path, R_OK) == 0 ? path : NULL;
}
