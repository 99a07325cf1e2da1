/* SPDX-License-Identifier: MIT */
/*
 * block.h: between the emulator's driver (emu.c), the kernels compiled for the host (through device-host.h) and the runner of
 * blocks (block.c): C and C++.
 *
 * One thread of the process runs blocks at a time; what is named here is its state. Nothing but tests may use it.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A kernel compiled into this library; those of all files lie side by side in one section, which the linker bounds. */
struct emu_kernel {
	const char *name;
	void (*run)(const void *args); /* the work of one thread */
	size_t args_bytes;
};
#define EMU_KERNEL_ENTRY __attribute__((section("emu_kernels"), used, aligned(8)))

struct emu_index {
	unsigned x, y, z;
};

/* The built-in variables of a kernel. */
extern struct emu_index threadIdx, blockIdx, blockDim, gridDim;

/* What the lanes of a warp meet in: all in the same. */
enum emu_meeting {
	EMU_SYNC,
	EMU_SHFL,
	EMU_SHFL_XOR,
	EMU_SHFL_DOWN,
	EMU_SHFL_UP,
	EMU_BALLOT,
	EMU_MMA_S8,
	EMU_MMA_BF16,
};

void emu_block_wait(void);
/* Leaves a lane's bytes (24 at most), waits for the other lanes; what they left, until the second meeting from now. */
const void *emu_warp_meet(enum emu_meeting what, unsigned mask, const void *data, size_t bytes);
const void *emu_warp_lane(const void *meeting, int lane); /* ends the process when that lane has left nothing */
int emu_warp_has(const void *meeting, int lane);
int emu_lane(void);
/* A block's first use of a static array fills it with 0xff; *used remembers which block that was. */
void emu_shared(void *array, size_t bytes, unsigned long *used);
void *emu_dynamic_shared(void);

/* Runs all blocks of a grid, one after the other. */
void emu_run_grid(const struct emu_kernel *kernel, struct emu_index grid, struct emu_index threads,
		  size_t shared_bytes, const void *args);
/* Gives the stacks back: the thread that ran grids is about to end. */
void emu_run_done(void);

#ifdef __cplusplus
}
#endif
