/* SPDX-License-Identifier: MIT */
/*
 * block.c: runs a grid on the CPU: its blocks one after the other, the threads of a block as fibers that take turns at barriers.
 *
 * Owns the fibers and their stacks; called by the emulator's one worker thread, and inside a kernel by the kernel. Refuses to
 * know streams and memory. A fiber runs until it meets others, so what a kernel leaves unordered would always happen in the same
 * order: therefore every other block takes its threads from the last to the first. Invariant: whoever arrives last at a
 * barrier releases the others and goes on; nobody ready and somebody not done is a deadlock, and ends the process.
 */
#include "tests/emu/block.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/cuda/args.h"

#ifndef __has_feature
#define __has_feature(x) 0
#endif

#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#include <sanitizer/common_interface_defs.h>
#define STACK_BYTES (512u << 10) /* red zones make large frames */
#else
#define STACK_BYTES (64u << 10)
static void __sanitizer_start_switch_fiber(void **save, const void *bottom, size_t size)
{
	(void)save, (void)bottom, (void)size;
}

static void __sanitizer_finish_switch_fiber(void *save, const void **bottom, size_t *size)
{
	(void)save, (void)bottom, (void)size;
}
#endif

#define MAX_THREADS   1024
#define MAX_SHARED    (48u << 10)
#define MEETING_BYTES 24

enum fiber_state { FIBER_READY, FIBER_AT_WARP, FIBER_AT_BLOCK, FIBER_DONE };

struct fiber {
	void *sp;    /* where it stopped: everything else is on its stack */
	void *fake;  /* of AddressSanitizer */
	char *stack; /* lowest address; a page without rights lies below */
	size_t stack_bytes;
	struct emu_index index;
};

/* What lanes leave for each other. Two take turns: a lane can be at the next while another still reads this one. */
struct meeting {
	_Alignas(8) unsigned char data[CUDA_WARP][MEETING_BYTES];
	unsigned present;
};

struct warp {
	struct meeting meetings[2];
	unsigned turn, n_live, n_arrived;
	enum emu_meeting what;
};

struct emu_index threadIdx, blockIdx, blockDim, gridDim;

static struct fiber fibers[MAX_THREADS], outside;
static enum fiber_state states[MAX_THREADS];
static struct warp warps[MAX_THREADS / CUDA_WARP];
static unsigned n_threads, n_live, n_arrived, running;
static bool backwards;
static unsigned long block_number;

static const struct emu_kernel *kernel;
static const void *kernel_args;
static unsigned char *dynamic;
static size_t dynamic_bytes, static_bytes;

/* The kernel is at fault: there is nothing to return to. */
static void __attribute__((noreturn, format(printf, 1, 2))) die(const char *format, ...)
{
	__builtin_va_list args;

	fprintf(stderr, "emulator: %s, block (%u, %u, %u), thread %u: ", kernel->name, blockIdx.x,
		blockIdx.y, blockIdx.z, running);
	__builtin_va_start(args, format);
	vfprintf(stderr, format, args);
	__builtin_va_end(args);
	fputc('\n', stderr);
	abort();
}

/* ---- switching ---- */

/* Saves what a call must preserve, leaves the stack pointer in *save, and returns on the other stack. */
void emu_switch_stack(void **save, void *sp);
static void fiber_main(void);

#if defined(__x86_64__)
__asm__(".text\n"
	".globl emu_switch_stack\n"
	".hidden emu_switch_stack\n"
	".type emu_switch_stack, @function\n"
	"emu_switch_stack:\n"
	"	push %rbp\n"
	"	push %rbx\n"
	"	push %r12\n"
	"	push %r13\n"
	"	push %r14\n"
	"	push %r15\n"
	"	mov %rsp, (%rdi)\n"
	"	mov %rsi, %rsp\n"
	"	pop %r15\n"
	"	pop %r14\n"
	"	pop %r13\n"
	"	pop %r12\n"
	"	pop %rbx\n"
	"	pop %rbp\n"
	"	ret\n"
	".size emu_switch_stack, . - emu_switch_stack\n");

static void fiber_prepare(struct fiber *f)
{
	/* Seven words as emu_switch_stack() left them, the last the address it returns to; one more, so that the stack is
	 * aligned as after a call. */
	void **sp = (void **)(void *)(f->stack + f->stack_bytes) - 8;

	memset(sp, 0, 8 * sizeof(*sp));
	sp[6] = (void *)fiber_main;
	f->sp = sp;
}
#else
#include <ucontext.h>

void emu_switch_stack(void **save, void *sp)
{
	ucontext_t here;

	*save = &here;
	swapcontext(&here, sp);
}

static void fiber_prepare(struct fiber *f)
{
	ucontext_t *c = (ucontext_t *)(void *)f->stack; /* the lowest part of the stack is not reached */

	getcontext(c);
	c->uc_stack.ss_sp = f->stack + sizeof(*c);
	c->uc_stack.ss_size = f->stack_bytes - sizeof(*c);
	c->uc_link = NULL;
	makecontext(c, fiber_main, 0);
	f->sp = c;
}
#endif

static void fiber_switch(struct fiber *from, struct fiber *to)
{
	threadIdx = to->index;
	__sanitizer_start_switch_fiber(&from->fake, to->stack, to->stack_bytes);
	emu_switch_stack(&from->sp, to->sp);
	__sanitizer_finish_switch_fiber(from->fake, NULL, NULL);
}

/* The next that can run, in the direction of this block. */
static void run_next(void)
{
	struct fiber *self = &fibers[running];
	unsigned next = running;

	do {
		next = backwards ? (next ? next : n_threads) - 1 : (next + 1) % n_threads;
		if (states[next] == FIBER_READY) {
			running = next;
			fiber_switch(self, &fibers[next]);
			return;
		}
	} while (next != running);
	if (n_live)
		die("deadlock: %u of %u threads are left, %u wait for the block, the others for their warp",
		    n_live, n_threads, n_arrived);
	fiber_switch(self, &outside);
}

static void release(enum fiber_state waiting, unsigned first, unsigned last)
{
	for (unsigned i = first; i < last; i++)
		if (states[i] == waiting)
			states[i] = FIBER_READY;
}

static void warp_release_if_all(unsigned w)
{
	struct warp *warp = &warps[w];
	unsigned first = w * CUDA_WARP, last = first + CUDA_WARP;

	if (warp->n_arrived < warp->n_live || !warp->n_arrived)
		return;
	warp->n_arrived = 0;
	warp->turn ^= 1;
	release(FIBER_AT_WARP, first, last < n_threads ? last : n_threads);
}

static void block_release_if_all(void)
{
	if (n_arrived < n_live || !n_arrived)
		return;
	n_arrived = 0;
	release(FIBER_AT_BLOCK, 0, n_threads);
}

/* A thread that has ended is no longer waited for. */
static void fiber_main(void)
{
	__sanitizer_finish_switch_fiber(NULL, NULL, NULL);
	for (;;) {
		kernel->run(kernel_args);
		states[running] = FIBER_DONE;
		n_live--;
		warps[running / CUDA_WARP].n_live--;
		warp_release_if_all(running / CUDA_WARP);
		block_release_if_all();
		run_next();
	}
}

/* ---- what kernels call ---- */

int emu_lane(void)
{
	return (int)(running % CUDA_WARP);
}

void emu_block_wait(void)
{
	unsigned self = running;

	n_arrived++;
	states[self] = FIBER_AT_BLOCK;
	block_release_if_all();
	if (states[self] != FIBER_READY)
		run_next();
}

const void *emu_warp_meet(enum emu_meeting what, unsigned mask, const void *data, size_t bytes)
{
	unsigned self = running, w = self / CUDA_WARP, lane = self % CUDA_WARP;
	struct warp *warp = &warps[w];
	struct meeting *m = &warp->meetings[warp->turn];

	if (mask != 0xffffffff)
		die("a warp function with mask %#x: only whole warps are allowed for", mask);
	if (!warp->n_arrived) {
		warp->what = what;
		m->present = 0;
	} else if (warp->what != what) {
		die("lanes of a warp meet in different functions (%d and %d)", (int)warp->what,
		    (int)what);
	}
	if (bytes) {
		memcpy(m->data[lane], data, bytes);
		m->present |= 1u << lane;
	}
	warp->n_arrived++;
	states[self] = FIBER_AT_WARP;
	warp_release_if_all(w);
	if (states[self] != FIBER_READY)
		run_next();
	return m;
}

int emu_warp_has(const void *meeting, int lane)
{
	return (int)(((const struct meeting *)meeting)->present >> lane & 1);
}

const void *emu_warp_lane(const void *meeting, int lane)
{
	if (!emu_warp_has(meeting, lane))
		die("lane %d is asked for its value and does not take part", lane);
	return ((const struct meeting *)meeting)->data[lane];
}

void emu_shared(void *array, size_t bytes, unsigned long *used)
{
	if (*used == block_number)
		return;
	*used = block_number;
	static_bytes += bytes;
	if (static_bytes + dynamic_bytes > MAX_SHARED)
		die("%zu bytes of static and %zu of dynamic shared memory: a block has %u",
		    static_bytes, dynamic_bytes, MAX_SHARED);
	memset(array, 0xff, bytes);
}

void *emu_dynamic_shared(void)
{
	return dynamic;
}

/* ---- blocks ---- */

static void fiber_make(struct fiber *f)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	char *p = mmap(NULL, STACK_BYTES + page, PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (p == MAP_FAILED || mprotect(p, page, PROT_NONE) < 0)
		die("no memory for the stack of a thread");
	f->stack = p + page;
	f->stack_bytes = STACK_BYTES;
	fiber_prepare(f);
}

/* The worker's own stack, which AddressSanitizer wants to know. */
static void outside_find(void)
{
	pthread_attr_t attr;
	void *stack;

	if (pthread_getattr_np(pthread_self(), &attr) != 0)
		return;
	if (pthread_attr_getstack(&attr, &stack, &outside.stack_bytes) == 0)
		outside.stack = stack;
	pthread_attr_destroy(&attr);
}

static void run_block(void)
{
	block_number++;
	backwards = block_number % 2 == 0;
	static_bytes = 0;
	n_live = n_threads;
	n_arrived = 0;
	for (unsigned i = 0; i < n_threads; i++)
		states[i] = FIBER_READY;
	for (unsigned w = 0; w * CUDA_WARP < n_threads; w++) {
		unsigned rest = n_threads - w * CUDA_WARP;

		warps[w].n_live = rest < CUDA_WARP ? rest : CUDA_WARP;
		warps[w].n_arrived = 0;
	}
	if (dynamic_bytes)
		memset(dynamic, 0xff, dynamic_bytes);
	running = backwards ? n_threads - 1 : 0;
	fiber_switch(&outside, &fibers[running]);
}

void emu_run_grid(const struct emu_kernel *k, struct emu_index grid, struct emu_index threads,
		  size_t shared_bytes, const void *args)
{
	kernel = k;
	kernel_args = args;
	gridDim = grid;
	blockDim = threads;
	n_threads = threads.x * threads.y * threads.z;
	dynamic_bytes = shared_bytes;
	if (n_threads > MAX_THREADS || shared_bytes > MAX_SHARED)
		die("%u threads, %zu bytes of shared memory", n_threads, shared_bytes);
	if (!outside.stack)
		outside_find();
	for (unsigned i = 0; i < n_threads; i++) {
		if (!fibers[i].stack)
			fiber_make(&fibers[i]);
		fibers[i].index = (struct emu_index){ i % threads.x, i / threads.x % threads.y,
						      i / threads.x / threads.y };
	}
	dynamic = NULL;
	if (shared_bytes && posix_memalign((void **)&dynamic, 16, shared_bytes) != 0)
		die("no memory for %zu bytes of shared memory", shared_bytes);
	for (unsigned z = 0; z < grid.z; z++)
		for (unsigned y = 0; y < grid.y; y++)
			for (unsigned x = 0; x < grid.x; x++) {
				blockIdx = (struct emu_index){ x, y, z };
				run_block();
			}
	free(dynamic);
	dynamic = NULL;
}

/* The worker ends, another may come. */
void emu_run_done(void)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);

	for (unsigned i = 0; i < MAX_THREADS && fibers[i].stack; i++) {
		munmap(fibers[i].stack - page, STACK_BYTES + page);
		fibers[i] = (struct fiber){ 0 };
	}
	outside = (struct fiber){ 0 };
}
