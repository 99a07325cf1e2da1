# SPDX-License-Identifier: MIT
#
# What becomes of kernels/cuda: machine code inside the daemon, where there is an nvcc, and the emulator's library for the tests.
# Included by the Makefile. CUDA=no leaves the machine code out, as does a machine without nvcc: such a daemon computes on the CPU. The code is the
# same for every variant of the build, and takes a minute: it is built once, in CUDA_OUT.

CUDA ?= yes
CUDA_OUT ?= build/cuda
ifndef NVCC
NVCC := $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard $(CUDA_HOME)/bin/nvcc /usr/local/cuda/bin/nvcc))
endif
ifeq ($(origin CXX),default)
CXX = $(if $(findstring clang,$(notdir $(CC))),clang++,g++)
endif

CUDA_SRC := $(wildcard kernels/cuda/*.cu)
CUDA_CODE := $(if $(filter-out no,$(CUDA)),$(if $(NVCC),$(CUDA_SRC:kernels/cuda/%.cu=$(CUDA_OUT)/%.fatbin)))
EMU_OBJ := $(patsubst %.c,$(O)/pic/%.o,$(wildcard tests/emu/*.c)) \
	$(patsubst %.cu,$(O)/pic/%.cu.o,$(CUDA_SRC) tests/emu/test-kernels.cu)

# One file a recipe, all architectures in it: make -j builds several files at once.
$(CUDA_OUT)/%.fatbin: kernels/cuda/%.cu $(wildcard kernels/cuda/*.cuh) kernels/cuda/args.h kernels/cpu/quant.h kernels/cuda/build
	$(say) NVCC $@
	@mkdir -p $(@D)
	$(Q)WERROR='$(WERROR)' kernels/cuda/build code $(NVCC) $< $(basename $@)

# Which files, and whether there was an nvcc.
$(CUDA_OUT)/files: FORCE
	@mkdir -p $(@D)
	@echo '$(CUDA_CODE)' | cmp -s - $@ || echo '$(CUDA_CODE)' >$@

$(CUDA_OUT)/images.c: $(CUDA_CODE) $(CUDA_OUT)/files kernels/cuda/build
	$(say) GEN $@$(if $(CUDA_CODE),,' (no code for GPUs$(if $(filter-out no,$(CUDA)),: there is no nvcc))')
	$(Q)kernels/cuda/build images $(CUDA_CODE:.fatbin=) >$@

# .incbin, which the compiler does not report.
$(O)/obj/kernels/cuda/images.o: $(CUDA_OUT)/images.c $(CUDA_CODE) $(O)/flags
	$(say) CC $@
	@mkdir -p $(@D)
	$(Q)$(COMPILE) -fPIE -c -o $@ $<

# The same files for the host. No exceptions, no types at run time: nothing of C++ but its compiler.
$(O)/pic/%.cu.o: %.cu $(O)/flags
	$(say) CXX $@
	@mkdir -p $(@D)
	$(Q)$(CXX) -x c++ -std=gnu++17 -I. -Wall -Wextra -Wconversion $(if $(WERROR),-Werror) $(HARDEN) $(CPPFLAGS) $(CFLAGS) \
		-fPIC -fvisibility=hidden -fno-exceptions -fno-rtti -fno-strict-aliasing -MMD -MP -c -o $@ $<

$(O)/tests/libcuda-emu.so: $(EMU_OBJ)
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(CXX) -shared $(BASE_LDFLAGS) $(CFLAGS) $(LDFLAGS) -o $@ $^ -lm -pthread

# Loaded at run time, from beside the tests.
$(UNIT): | $(O)/tests/libcuda-emu.so

