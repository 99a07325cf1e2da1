# SPDX-License-Identifier: MIT
#
# One flat make for the whole tree. `make help` lists the targets, V=1 shows the commands, O=DIR builds elsewhere.
# Variants (sanitizers, clang, fuzzing) are the same rules with another O: they call make again, never in another folder.

VERSION = 0.1.0
SOVERSION = 0

O ?= build
PREFIX ?= /usr/local
BINDIR ?= $(PREFIX)/bin
SBINDIR ?= $(PREFIX)/sbin
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
DATADIR ?= $(PREFIX)/share
MANDIR ?= $(DATADIR)/man

ifeq ($(origin CC),default)
CC = gcc
endif
AR ?= ar
OBJCOPY ?= objcopy
INSTALL ?= install
PKG_CONFIG ?= pkg-config
FUZZ_SECONDS ?= 30
TEST_TIMEOUT ?= 300

ifeq ($(V),1)
Q =
say = @:
else
Q = @
say = @printf '  %-8s%s\n'
MAKEFLAGS += --no-print-directory
endif

# ---- flags: CFLAGS and LDFLAGS are the caller's, everything the code needs is beside them ----

CFLAGS ?= -O2 -g
WARNINGS = -Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes
ifeq ($(SANITIZE),)
HARDEN = -fstack-protector-strong -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2
else
HARDEN = -fsanitize=$(SANITIZE) -fno-sanitize-recover=all -fno-omit-frame-pointer
endif
BASE_CFLAGS = -std=gnu17 -D_GNU_SOURCE -DRESIDENTD_VERSION='"$(VERSION)"' -I. $(WARNINGS) $(if $(WERROR),-Werror) $(HARDEN)
BASE_LDFLAGS = -Wl,-z,relro,-z,now $(if $(SANITIZE),-fsanitize=$(SANITIZE))

# pkg-config runs when a recipe first needs it, not when this file is read: `make deps` may have to install it first.
lazy = $(eval $(1) := $(shell $(PKG_CONFIG) $(2) 2>/dev/null))$($(1))
DAEMON_PKGS = libsystemd libpcre2-8 jansson
PKG_CFLAGS = $(call lazy,PKG_CFLAGS,--cflags $(DAEMON_PKGS) libedit)
PKG_LIBS = $(call lazy,PKG_LIBS,--libs $(DAEMON_PKGS))
DAEMON_LIBS = $(PKG_LIBS) -lm -pthread
CLIENT_LIBS = $(call lazy,CLIENT_LIBS,--libs jansson)
EDIT_LIBS = $(call lazy,EDIT_LIBS,--libs libedit)
TEST_LIBS = $(call lazy,TEST_LIBS,--libs cmocka)

COMPILE = $(CC) $(BASE_CFLAGS) $(PKG_CFLAGS) $(CPPFLAGS) $(CFLAGS) -MMD -MP
LINK = $(CC) $(BASE_LDFLAGS) $(CFLAGS) $(LDFLAGS)

# ---- what is built from what ----

LIB_SRC := $(filter-out daemon/main.c,$(wildcard daemon/*.c daemon/model/*.c daemon/engine/*.c kernels/cpu/*.c))
LIB_OBJ := $(LIB_SRC:%.c=$(O)/obj/%.o)
CLIENT_LIB_SRC := client/libresident.c client/wire.c daemon/varlink.c daemon/errors.c daemon/base.c
CLIENT_LIB_OBJ := $(CLIENT_LIB_SRC:%.c=$(O)/pic/%.o)
RESIDENT_SRC := $(filter-out $(CLIENT_LIB_SRC) client/residentctl.c client/install.c client/example.c,$(wildcard client/*.c))
RESIDENT_OBJ := $(RESIDENT_SRC:%.c=$(O)/obj/%.o)
RESIDENTCTL_OBJ := $(patsubst %,$(O)/obj/client/%.o,residentctl install report terminal)

UNIT := $(patsubst %.c,$(O)/%,$(wildcard tests/unit/test-*.c))
FUZZ := $(patsubst %.c,$(O)/%,$(wildcard tests/fuzz/fuzz-*.c))
BENCH := $(patsubst %.c,$(O)/%,$(wildcard tests/bench/*.c))
PARITY := $(O)/tests/parity/residentd-logits $(O)/tests/parity/compare-logits
SCRIPTS := $(wildcard tests/golden/test-*.py tests/sys/test-*.py)
MAN := $(wildcard packaging/man/*.[1-8])
C_FILES := $(wildcard daemon/*.[ch] daemon/*/*.[ch] kernels/*/*.[ch] client/*.[ch] tests/*.h tests/*/*.[ch])

PROGRAMS := $(O)/residentd $(O)/resident $(O)/residentctl
LIBRARIES := $(O)/libresident.so $(O)/libresident.a $(O)/libresident.pc

.PHONY: all
all: $(PROGRAMS) $(LIBRARIES)

$(O)/residentd: $(O)/obj/daemon/main.o $(O)/libresidentd.a
	$(say) LINK $@
	$(Q)$(LINK) -pie -o $@ $^ $(DAEMON_LIBS)

$(O)/residentctl: $(RESIDENTCTL_OBJ) $(O)/libresident.a $(O)/libresidentd.a
	$(say) LINK $@
	$(Q)$(LINK) -pie -o $@ $^ $(DAEMON_LIBS)

# The programs carry the library inside, so that one file can be copied to another machine.
$(O)/resident: $(RESIDENT_OBJ) $(O)/obj/daemon/base.o $(O)/libresident.a
	$(say) LINK $@
	$(Q)$(LINK) -pie -o $@ $^ $(CLIENT_LIBS) $(EDIT_LIBS)

$(O)/libresidentd.a: $(LIB_OBJ)
	$(say) AR $@
	$(Q)rm -f $@ && $(AR) rcs $@ $^

$(O)/libresident.so.$(SOVERSION): $(CLIENT_LIB_OBJ) client/libresident.map
	$(say) LINK $@
	$(Q)$(LINK) -shared -Wl,-soname,$(@F) -Wl,--version-script=client/libresident.map $(if $(SANITIZE),,-Wl,-z,defs) \
		-o $@ $(CLIENT_LIB_OBJ) $(CLIENT_LIBS)

$(O)/libresident.so: $(O)/libresident.so.$(SOVERSION)
	$(Q)ln -sf $(<F) $@

# One object with the hidden names made local: the static library exports what the shared one does.
$(O)/libresident.a: $(CLIENT_LIB_OBJ)
	$(say) AR $@
	$(Q)$(CC) -r -nostdlib -o $(O)/pic/libresident.o $^
	$(Q)$(OBJCOPY) --localize-hidden $(O)/pic/libresident.o
	$(Q)rm -f $@ && $(AR) rcs $@ $(O)/pic/libresident.o

$(O)/libresident.pc: client/libresident.pc.in $(O)/places
	$(say) GEN $@
	$(Q)sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@LIBDIR@|$(LIBDIR)|' -e 's|@INCLUDEDIR@|$(INCLUDEDIR)|' \
		-e 's|@VERSION@|$(VERSION)|' $< >$@

# The scalar kernels are the reference and the fallback, and worth the optimiser's time. Only avx2*.c may use AVX2:
# the others run before the processor was asked what it can do.
$(O)/obj/kernels/cpu/%.o: EXTRA = -O3
ifneq ($(filter x86_64-%,$(shell $(CC) -dumpmachine 2>/dev/null)),)
$(addprefix $(O)/obj/kernels/cpu/,avx2.o avx2-quant.o): EXTRA = -O3 -mavx2 -mfma -mf16c
endif

# .incbin, which the compiler does not report.
$(O)/obj/daemon/interface.o: policy/org.residentd.varlink

$(O)/obj/%.o: %.c $(O)/flags | $(O)/packages
	$(say) CC $@
	@mkdir -p $(@D)
	$(Q)$(COMPILE) -fPIE $(EXTRA) -c -o $@ $<

$(O)/pic/%.o: %.c $(O)/flags | $(O)/packages
	$(say) CC $@
	@mkdir -p $(@D)
	$(Q)$(COMPILE) -fPIC -fvisibility=hidden -c -o $@ $<

# Other flags than last time: everything is built again; other places: only what names them.
$(O)/flags: WORDS = $(COMPILE) $(LINK)
$(O)/places: WORDS = $(PREFIX) $(LIBDIR) $(INCLUDEDIR) $(VERSION)
$(O)/flags $(O)/places: FORCE
	@mkdir -p $(@D)
	@echo '$(subst ','\'',$(WORDS))' | cmp -s - $@ || echo '$(subst ','\'',$(WORDS))' >$@

$(O)/packages: packaging/deps.list
	@mkdir -p $(@D)
	@PKG_CONFIG='$(PKG_CONFIG)' YES=0 packaging/deps build || { echo 'residentd: `make deps` installs what is missing' >&2; exit 1; }
	@touch $@

.PHONY: FORCE
FORCE:
.DELETE_ON_ERROR:
.SECONDARY:

# ---- tests ----

$(O)/tests/unit/%: $(O)/obj/tests/unit/%.o $(O)/libresidentd.a $(O)/libresident.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(LINK) -pie -o $@ $^ $(TEST_LIBS) $(DAEMON_LIBS)

ifneq ($(LIBFUZZER),)
$(O)/tests/fuzz/%: $(O)/obj/tests/fuzz/%.o $(O)/libresidentd.a $(O)/libresident.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(LINK) -fsanitize=fuzzer -o $@ $^ $(DAEMON_LIBS)
else
$(O)/tests/fuzz/%: $(O)/obj/tests/fuzz/%.o $(O)/obj/tests/fuzz/main.o $(O)/libresidentd.a $(O)/libresident.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(LINK) -pie -o $@ $^ $(DAEMON_LIBS)
endif

$(BENCH) $(PARITY): $(O)/%: $(O)/obj/%.o $(O)/libresidentd.a
	$(say) LINK $@
	@mkdir -p $(@D)
	$(Q)$(LINK) -pie -o $@ $^ $(DAEMON_LIBS)

# The example is built as a stranger would: against the shared library, with nothing of this tree but the header.
$(O)/example: client/example.c client/resident.h $(O)/libresident.so $(O)/flags
	$(say) CC $@
	$(Q)$(CC) -std=c17 $(WARNINGS) $(if $(WERROR),-Werror) -Iclient $(CFLAGS) $(if $(SANITIZE),-fsanitize=$(SANITIZE)) \
		-o $@ $< -L$(O) -lresident -Wl,-rpath,'$$ORIGIN'

.PHONY: tests
tests: all $(UNIT) $(FUZZ) $(BENCH) $(PARITY) $(O)/example

# `make demo` and `make check` start on a bare machine: packages first, then a make that sees them.
.PHONY: check check-run asan parity
check:
	@packaging/deps build check
	+@$(MAKE) check-run

check-run: tests
	@O=$(O) tests/run --timeout $(TEST_TIMEOUT) --total $(O)/tests/total $(UNIT) $(FUZZ) $(SCRIPTS)

asan:
	+@ASAN_OPTIONS=detect_leaks=1:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 \
		$(MAKE) O=build/asan SANITIZE=address,undefined CFLAGS='-O1 -g' check

parity: all $(PARITY)
	@O=$(O) tests/parity/run-parity.py

.PHONY: bench fuzz
bench: $(BENCH)
	@for b in $^; do echo "== $$b"; $$b || exit 1; done

fuzz:
	@packaging/deps build develop
	+@$(MAKE) O=build/fuzz CC=clang SANITIZE=address,undefined,fuzzer-no-link LIBFUZZER=1 CFLAGS='-O1 -g' fuzz-run

.PHONY: fuzz-run
fuzz-run: $(FUZZ)
	@set -e; for f in $^; do n=$${f##*/fuzz-}; echo "== fuzz-$$n: $(FUZZ_SECONDS) s"; mkdir -p $(O)/found/$$n; \
		$$f -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 -artifact_prefix=$(O)/found/$$n- \
			$(O)/found/$$n tests/corpus/$$n 2>$(O)/found/$$n.log || { tail -n 60 $(O)/found/$$n.log; exit 1; }; \
		grep -E 'DONE|exec_per_sec' $(O)/found/$$n.log || :; done

# ---- everyday ----

.PHONY: deps demo format format-check lint
deps:
	@packaging/deps build check develop

demo:
	@packaging/deps build
	+@$(MAKE) all
	@O=$(O) packaging/demo

format:
	clang-format -i $(C_FILES)

format-check:
	@clang-format --dry-run -Werror $(C_FILES)

lint:
	mandoc -T lint -W warning $(MAN)

.PHONY: install uninstall
install: all
	$(INSTALL) -d $(DESTDIR)$(BINDIR) $(DESTDIR)$(SBINDIR) $(DESTDIR)$(LIBDIR)/pkgconfig $(DESTDIR)$(INCLUDEDIR) \
		$(DESTDIR)$(DATADIR)/residentd
	$(INSTALL) -m 0755 $(O)/resident $(O)/residentctl $(DESTDIR)$(BINDIR)/
	$(INSTALL) -m 0755 $(O)/residentd $(DESTDIR)$(SBINDIR)/
	$(INSTALL) -m 0755 $(O)/libresident.so.$(SOVERSION) $(DESTDIR)$(LIBDIR)/
	ln -sf libresident.so.$(SOVERSION) $(DESTDIR)$(LIBDIR)/libresident.so
	$(INSTALL) -m 0644 $(O)/libresident.a $(DESTDIR)$(LIBDIR)/
	$(INSTALL) -m 0644 $(O)/libresident.pc $(DESTDIR)$(LIBDIR)/pkgconfig/
	$(INSTALL) -m 0644 client/resident.h $(DESTDIR)$(INCLUDEDIR)/
	$(INSTALL) -m 0644 policy/org.residentd.varlink policy/residentd.conf $(DESTDIR)$(DATADIR)/residentd/
	for m in $(MAN); do d=$(DESTDIR)$(MANDIR)/man$${m##*.}; $(INSTALL) -d $$d && $(INSTALL) -m 0644 $$m $$d/ || exit 1; done

uninstall:
	rm -f $(addprefix $(DESTDIR)$(BINDIR)/,resident residentctl) $(DESTDIR)$(SBINDIR)/residentd
	rm -f $(addprefix $(DESTDIR)$(LIBDIR)/,libresident.so libresident.so.$(SOVERSION) libresident.a pkgconfig/libresident.pc)
	rm -f $(DESTDIR)$(INCLUDEDIR)/resident.h
	rm -rf $(DESTDIR)$(DATADIR)/residentd
	rm -f $(foreach m,$(notdir $(MAN)),$(DESTDIR)$(MANDIR)/man$(patsubst .%,%,$(suffix $(m)))/$(m))

.PHONY: clean help
clean:
	rm -rf $(O)

help:
	@echo 'make              build everything into $(O)/'
	@echo 'make demo         install what is missing, build, ask a private residentd one question'
	@echo 'make check        install what is missing, build, run every test'
	@echo 'make asan         the same tests under AddressSanitizer and UBSan (build/asan)'
	@echo 'make parity       compare the engine with an independent implementation'
	@echo 'make fuzz         each fuzz target for FUZZ_SECONDS=$(FUZZ_SECONDS) with clang libFuzzer (build/fuzz)'
	@echo 'make bench        micro-benchmarks: tokenizer, kernels'
	@echo 'make deps         install the packages that building, testing and developing need'
	@echo 'make format       clang-format in place; format-check only looks'
	@echo 'make lint         check the manual pages'
	@echo 'make install      into DESTDIR, PREFIX=$(PREFIX), LIBDIR=$(LIBDIR); uninstall removes it'
	@echo 'make clean        remove $(O)/'
	@echo
	@echo 'Variables: O V=1 CC CFLAGS LDFLAGS SANITIZE=address,undefined WERROR=1 PREFIX DESTDIR LIBDIR FUZZ_SECONDS TEST_TIMEOUT'
	@echo 'This version computes on the CPU; CUDA and the eBPF tracer are not part of it, so no toolkit for them is looked for.'

-include $(shell find $(O) -name '*.d' 2>/dev/null)
