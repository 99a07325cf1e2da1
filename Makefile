# SPDX-License-Identifier: MIT
#
# One flat make for the whole tree. `make help` lists the targets, V=1 shows the commands, O=DIR builds elsewhere.
# Variants (sanitizers, clang, fuzzing) are the same rules with another O: they call make again, never in another folder.

.DEFAULT_GOAL := all

VERSION = 0.1.0
SOVERSION = 0

O ?= build
PREFIX ?= /usr/local
BINDIR ?= $(PREFIX)/bin
SBINDIR ?= $(PREFIX)/sbin
LIBEXECDIR ?= $(PREFIX)/libexec
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
DATADIR ?= $(PREFIX)/share
MANDIR ?= $(DATADIR)/man
SYSCONFDIR ?= /etc
VENDORDIR ?= $(PREFIX)/lib
UNITDIR ?= $(VENDORDIR)/systemd/system
BASHDIR ?= $(DATADIR)/bash-completion/completions
ZSHDIR ?= $(DATADIR)/zsh/site-functions

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
DAEMON_PKGS = libsystemd libpcre2-8 jansson liburing
PKG_CFLAGS = $(call lazy,PKG_CFLAGS,--cflags $(DAEMON_PKGS) dbus-1 libedit ncursesw)
PKG_LIBS = $(call lazy,PKG_LIBS,--libs $(DAEMON_PKGS))
DAEMON_LIBS = $(PKG_LIBS) -lm -pthread
CLIENT_LIBS = $(call lazy,CLIENT_LIBS,--libs jansson)
CONTROL_LIBS = $(call lazy,CONTROL_LIBS,--libs dbus-1)
EDIT_LIBS = $(call lazy,EDIT_LIBS,--libs libedit)
SCREEN_LIBS = $(call lazy,SCREEN_LIBS,--libs ncursesw)
TEST_LIBS = $(call lazy,TEST_LIBS,--libs cmocka)
HASH_LIBS = $(call lazy,HASH_LIBS,--libs nettle)
BPF_LIBS = $(call lazy,BPF_LIBS,--libs libbpf) -lelf -lz
BPF_CLANG ?= clang
LLVM_STRIP ?= llvm-strip
BPF_ARCH := $(if $(filter aarch64-%,$(shell $(CC) -dumpmachine 2>/dev/null)),arm64,x86)

COMPILE = $(CC) $(BASE_CFLAGS) $(PKG_CFLAGS) $(CPPFLAGS) $(CFLAGS) -MMD -MP
LINK = $(CC) $(BASE_LDFLAGS) $(CFLAGS) $(LDFLAGS)

# ---- what is built from what ----

LIB_SRC := $(filter-out daemon/main.c,$(wildcard daemon/*.c daemon/model/*.c daemon/engine/*.c daemon/residency/*.c kernels/cpu/*.c kernels/cuda/*.c))
LIB_OBJ := $(LIB_SRC:%.c=$(O)/obj/%.o) $(O)/obj/kernels/cuda/images.o
CLIENT_LIB_SRC := client/libresident.c client/wire.c daemon/varlink.c daemon/errors.c daemon/base.c
CLIENT_LIB_OBJ := $(CLIENT_LIB_SRC:%.c=$(O)/pic/%.o)
CONTROL_OBJ := $(patsubst %,$(O)/pic/%.o,client/control daemon/errors daemon/base)
RESIDENT_SRC := $(patsubst %,client/%.c,resident ask chat repl report terminal transcript)
RESIDENT_OBJ := $(RESIDENT_SRC:%.c=$(O)/obj/%.o)
RESIDENTCTL_SRC := $(wildcard client/ctl*.c) $(patsubst %,client/%.c,residentctl install report terminal)
RESIDENTCTL_OBJ := $(RESIDENTCTL_SRC:%.c=$(O)/obj/%.o)

# What residentctl makes of a look at the memory: tested without a service.
VIEW_OBJ := $(patsubst %,$(O)/obj/client/%.o,ctl ctl-residency-view ctl-svg ctl-top-draw terminal)
IMPORT_OBJ := $(patsubst %.c,$(O)/obj/%.o,$(filter-out %/main.c,$(wildcard daemon/import/*.c)))

UNIT := $(patsubst %.c,$(O)/%,$(wildcard tests/unit/test-*.c))
FUZZ := $(patsubst %.c,$(O)/%,$(wildcard tests/fuzz/fuzz-*.c))
BENCH := $(patsubst %.c,$(O)/%,$(wildcard tests/bench/*.c))
PARITY := $(O)/tests/parity/residentd-logits $(O)/tests/parity/compare-logits
SCRIPTS := $(wildcard tests/golden/test-*.py tests/sys/test-*.py tests/aarch64/test-*.py)
MAN := $(wildcard packaging/man/*.[1-8])
COMPLETIONS := $(notdir $(wildcard packaging/completions/*))
TOY_MODEL := tiny-qwen35moe-stories-q8_0.gguf
C_FILES := $(wildcard bpf/*.[ch] daemon/*.[ch] daemon/*/*.[ch] kernels/*/*.[ch] client/*.[ch] tests/*.h tests/*/*.[ch])

PROGRAMS := $(O)/residentd $(O)/residentd-import $(O)/residentd-bpf $(O)/resident $(O)/residentctl
LIBRARIES := $(O)/libresident.so $(O)/libresident.a $(O)/libresident.pc
UNITS := $(O)/residentd.service $(O)/residentd-import@.service $(O)/residentd-bpf.service
# A drop-in N-NAME.conf is for systemd N and later. What a package is built with, it will run with.
SYSTEMD_VERSION ?= $(call lazy,SYSTEMD_VERSION,--modversion libsystemd)
DROPINS = $(foreach f,$(wildcard units/residentd.service.d/*.conf),$(shell \
	[ $(firstword $(subst -, ,$(notdir $(f)))) -le "$(firstword $(subst ., ,$(SYSTEMD_VERSION)))" ] && echo $(f)))

include kernels/cuda/rules.mk

.PHONY: all
all: $(PROGRAMS) $(LIBRARIES) $(UNITS)

$(O)/residentd: $(O)/obj/daemon/main.o $(O)/libresidentd.a
	$(say) LINK $@
	$(Q)$(LINK) -pie -o $@ $^ $(DAEMON_LIBS)

$(O)/residentd-import: $(O)/obj/daemon/import/main.o $(IMPORT_OBJ) $(O)/libresidentd.a
	$(say) LINK $@
	$(Q)$(LINK) -pie -o $@ $^ $(DAEMON_LIBS) $(HASH_LIBS)

# With what residentd-import does, for a models directory of one's own.
$(O)/residentctl: $(RESIDENTCTL_OBJ) $(IMPORT_OBJ) $(O)/libresident.a $(O)/libresidentd.a
	$(say) LINK $@
	$(Q)$(LINK) -pie -o $@ $^ $(DAEMON_LIBS) $(CONTROL_LIBS) $(HASH_LIBS) $(SCREEN_LIBS)

# The programs carry the library inside, so that one file can be copied to another machine.
$(O)/resident: $(RESIDENT_OBJ) $(O)/obj/daemon/base.o $(O)/libresident.a
	$(say) LINK $@
	$(Q)$(LINK) -pie -o $@ $^ $(CLIENT_LIBS) $(EDIT_LIBS)

# The tracer: one object for the kernel, inside the program that loads it. No types of this machine's kernel are built in.
$(O)/residency.bpf.o: bpf/residency.bpf.c bpf/residency.h bpf/kernel-types.h $(O)/flags | $(O)/packages
	$(say) BPF $@
	$(Q)$(BPF_CLANG) -O2 -g -fdebug-compilation-dir=. -target bpf -mcpu=v3 -D__TARGET_ARCH_$(BPF_ARCH) -Wall -Wextra -I. -c -o $@ $< && \
		$(LLVM_STRIP) -g $@

$(O)/obj/bpf/residentd-bpf.o: EXTRA = -DRESIDENCY_OBJECT='"$(O)/residency.bpf.o"'
$(O)/obj/bpf/residentd-bpf.o: $(O)/residency.bpf.o

$(O)/residentd-bpf: $(O)/obj/bpf/residentd-bpf.o $(O)/obj/daemon/base.o
	$(say) LINK $@
	$(Q)$(LINK) -pie -o $@ $^ $(BPF_LIBS)

$(O)/libresidentd.a: $(LIB_OBJ)
	$(say) AR $@
	$(Q)rm -f $@ && $(AR) rcs $@ $^

$(O)/libresident.so.$(SOVERSION): $(CLIENT_LIB_OBJ) $(O)/pic/client/control.o client/libresident.map
	$(say) LINK $@
	$(Q)$(LINK) -shared -Wl,-soname,$(@F) -Wl,--version-script=client/libresident.map $(if $(SANITIZE),,-Wl,-z,defs) \
		-o $@ $(filter %.o,$^) $(CLIENT_LIBS) $(CONTROL_LIBS)

$(O)/libresident.so: $(O)/libresident.so.$(SOVERSION)
	$(Q)ln -sf $(<F) $@

# One object a half, with the hidden names made local: the static library exports what the shared one does, and who
# does not use the bus does not need libdbus.
$(O)/pic/libresident.o: $(CLIENT_LIB_OBJ)
$(O)/pic/control.o: $(CONTROL_OBJ)
$(O)/pic/libresident.o $(O)/pic/control.o:
	$(Q)$(CC) -r -nostdlib -o $@ $^
	$(Q)$(OBJCOPY) --localize-hidden $@

$(O)/libresident.a: $(O)/pic/libresident.o $(O)/pic/control.o
	$(say) AR $@
	$(Q)rm -f $@ && $(AR) rcs $@ $^

$(O)/libresident.pc: client/libresident.pc.in $(O)/places
	$(say) GEN $@
	$(Q)sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@LIBDIR@|$(LIBDIR)|' -e 's|@INCLUDEDIR@|$(INCLUDEDIR)|' \
		-e 's|@VERSION@|$(VERSION)|' $< >$@

$(O)/%.service: units/%.service.in $(O)/places
	$(say) GEN $@
	$(Q)sed -e 's|@SBINDIR@|$(SBINDIR)|' -e 's|@LIBEXECDIR@|$(LIBEXECDIR)|' $< >$@

# The scalar kernels are the reference and the fallback, and worth the optimiser's time. Only avx*.c and neon-dotprod.c may use more
# than the baseline: the others run before the processor was asked what it can do.
$(O)/obj/kernels/cpu/%.o $(O)/aarch64/kernels/cpu/%.o: EXTRA = -O3
ifneq ($(filter x86_64-%,$(shell $(CC) -dumpmachine 2>/dev/null)),)
$(addprefix $(O)/obj/kernels/cpu/,avx2.o avx2-quant.o): EXTRA = -O3 -mavx2 -mfma -mf16c
$(addprefix $(O)/obj/kernels/cpu/,avx512.o avx512-quant.o avx512-wide.o): EXTRA = -O3 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni
endif
ARM_KERNELS := $(O)/aarch64/kernels/cpu $(if $(filter aarch64-%,$(shell $(CC) -dumpmachine 2>/dev/null)),$(O)/obj/kernels/cpu)
$(ARM_KERNELS:%=%/neon-dotprod.o): EXTRA = -O3 -march=armv8.2-a+dotprod
# gcc 12 for ARM crashes on the reference with more.
$(ARM_KERNELS:%=%/ref.o): EXTRA = -O2

# The model that answers until there is a real one.
$(O)/obj/daemon/models.o: EXTRA = -DRESIDENTD_TOY_MODEL='"$(DATADIR)/residentd/models/$(TOY_MODEL)"'
$(O)/obj/daemon/models.o: $(O)/places

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
$(O)/places: WORDS = $(PREFIX) $(SBINDIR) $(LIBEXECDIR) $(LIBDIR) $(INCLUDEDIR) $(DATADIR) $(VERSION)
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
	$(Q)$(LINK) -pie -o $@ $(filter %.o,$^) $(filter %.a,$^) $(TEST_LIBS) $(DAEMON_LIBS) $(CONTROL_LIBS)

$(O)/tests/fuzz/fuzz-residency-view: $(VIEW_OBJ)
$(O)/tests/unit/test-residency-view: $(VIEW_OBJ) $(O)/obj/client/ctl-residency.o $(O)/obj/client/report.o
$(O)/tests/unit/test-ctl-bench: $(patsubst %,$(O)/obj/client/%.o,ctl ctl-bench-view ctl-svg terminal) $(O)/obj/client/ctl-residency-view.o
$(O)/tests/unit/test-import: $(IMPORT_OBJ)
$(O)/tests/unit/test-import: DAEMON_LIBS += $(HASH_LIBS)

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

# The kernels for 64-bit ARM and their tests, for an emulator: tests/aarch64/test-aarch64.py runs them. Where the cross compiler is
# not there, they are not built. The C library is static and cmocka is a header of ours, so that nothing else is needed.
ARM_CC ?= aarch64-linux-gnu-gcc
ARM_OBJ := $(patsubst %.c,$(O)/aarch64/%.o,daemon/base.c $(wildcard $(addprefix kernels/cpu/,dispatch.c quant.c codebook.c ref*.c neon*.c)))
ARM_LIBC := $(wildcard $(shell $(ARM_CC) -print-file-name=libc.a 2>/dev/null))
ARM_TESTS := $(if $(ARM_LIBC),$(patsubst %,$(O)/aarch64/tests/unit/%,test-kernels test-kernels-float))

$(O)/aarch64/%.o: %.c $(O)/flags
	$(say) CC $@
	@mkdir -p $(@D)
	$(Q)$(ARM_CC) $(filter-out $(HARDEN),$(BASE_CFLAGS)) -O2 -g -Itests/aarch64 -MMD -MP $(EXTRA) -c -o $@ $<

$(O)/aarch64/tests/unit/%: $(O)/aarch64/tests/unit/%.o $(ARM_OBJ)
	$(say) LINK $@
	$(Q)$(ARM_CC) -static -o $@ $^ -lm

.PHONY: tests
tests: all $(UNIT) $(FUZZ) $(BENCH) $(PARITY) $(ARM_TESTS) $(O)/example

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

# On a real systemd, in a container or (slowly) in a virtual machine. 77: root or a tool is missing, and it says which.
.PHONY: integration integration-vm
integration: BOOT = boot-container
integration-vm: BOOT = boot-vm
integration integration-vm: $(O)/tests/unit/test-feed
	@rm -rf $(O)/stage
	+@$(MAKE) PREFIX=/usr DESTDIR=$(O)/stage install >/dev/null
	@O=$(O) tests/sys/boot/integration $(BOOT) || [ $$? -eq 77 ]
# The tracer on another kernel than this one: a container has this one, and no right to trace.
	@[ $(BOOT) != boot-vm ] || O=$(O) tests/sys/boot/feed boot-vm || [ $$? -eq 77 ]

# The engine beside llama.cpp with the model in memory, and the kernels: some ten minutes, see tests/bench/cpu.py. ARGS: its options.
.PHONY: bench profile bench-residency fuzz
bench: $(O)/residentd $(O)/residentctl $(addprefix $(O)/tests/bench/bench-,decode kernels tokenizer)
	@tests/bench/cpu.py --build $(O) $(ARGS) || [ $$? -eq 77 ]
	@echo && $(O)/tests/bench/bench-tokenizer

# Where the time of a prompt and of an answer goes, by perf.
profile: $(O)/tests/bench/bench-decode
	@tests/bench/profile.py --build $(O) $(ARGS) || [ $$? -eq 77 ]

# The engine with less memory than the model has, beside llama.cpp in the same control group. Root, and some minutes.
bench-residency: all $(BENCH)
	@tests/bench/residency.py --build $(O)

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

# Programs and library may lie anywhere; the bus and polkit look for their files under /usr only: for the system service, PREFIX=/usr.
EXAMPLES := $(wildcard policy/examples/*)
.PHONY: install install-service uninstall
install: all install-service
	$(INSTALL) -d $(DESTDIR)$(BINDIR) $(DESTDIR)$(SBINDIR) $(DESTDIR)$(LIBDIR)/pkgconfig $(DESTDIR)$(INCLUDEDIR) \
		$(DESTDIR)$(DATADIR)/residentd/models
	$(INSTALL) -m 0755 $(O)/resident $(O)/residentctl $(DESTDIR)$(BINDIR)/
	$(INSTALL) -m 0755 $(O)/residentd $(DESTDIR)$(SBINDIR)/
	for p in residentd-import residentd-bpf; do \
		$(INSTALL) -D -m 0755 $(O)/$$p $(DESTDIR)$(LIBEXECDIR)/residentd/$$p || exit 1; done
	$(INSTALL) -m 0755 $(O)/libresident.so.$(SOVERSION) $(DESTDIR)$(LIBDIR)/
	ln -sf libresident.so.$(SOVERSION) $(DESTDIR)$(LIBDIR)/libresident.so
	$(INSTALL) -m 0644 $(O)/libresident.a $(DESTDIR)$(LIBDIR)/
	$(INSTALL) -m 0644 $(O)/libresident.pc $(DESTDIR)$(LIBDIR)/pkgconfig/
	$(INSTALL) -m 0644 client/resident.h client/resident-control.h $(DESTDIR)$(INCLUDEDIR)/
	$(INSTALL) -m 0644 policy/org.residentd.varlink $(DESTDIR)$(DATADIR)/residentd/
	$(INSTALL) -m 0644 tests/models/$(TOY_MODEL) $(DESTDIR)$(DATADIR)/residentd/models/
	$(INSTALL) -D -m 0644 tests/models/MODEL_CARD.md $(DESTDIR)$(DATADIR)/doc/residentd/MODEL_CARD.md
	for f in $(EXAMPLES); do $(INSTALL) -D -m 0644 $$f $(DESTDIR)$(DATADIR)/doc/residentd/examples/$${f##*/} || exit 1; done
	chmod 0755 $(DESTDIR)$(DATADIR)/doc/residentd/examples/residentd-power-profile
	for m in $(MAN); do d=$(DESTDIR)$(MANDIR)/man$${m##*.}; $(INSTALL) -d $$d && $(INSTALL) -m 0644 $$m $$d/ || exit 1; done
	for c in $(filter-out _%,$(COMPLETIONS)); do \
		$(INSTALL) -D -m 0644 packaging/completions/$$c $(DESTDIR)$(BASHDIR)/$${c%.bash} || exit 1; done
	for c in $(filter _%,$(COMPLETIONS)); do \
		$(INSTALL) -D -m 0644 packaging/completions/$$c $(DESTDIR)$(ZSHDIR)/$$c || exit 1; done

# What systemd, the bus, polkit and the journal read. The configuration as systemd has it: the vendor's file in /usr/lib says the
# defaults, /etc is the administrator's alone.
SERVICE_FILES = \
	$(O)/residentd.service:$(UNITDIR)/residentd.service \
	units/residentd.socket:$(UNITDIR)/residentd.socket \
	$(O)/residentd-import@.service:$(UNITDIR)/residentd-import@.service \
	units/residentd-import.socket:$(UNITDIR)/residentd-import.socket \
	$(O)/residentd-bpf.service:$(UNITDIR)/residentd-bpf.service \
	units/residentd-bpf.socket:$(UNITDIR)/residentd-bpf.socket \
	units/residentd-oomd.socket:$(UNITDIR)/residentd-oomd.socket \
	$(foreach f,$(DROPINS),$(f):$(UNITDIR)/residentd.service.d/$(notdir $(f))) \
	units/residentd.sysusers:$(VENDORDIR)/sysusers.d/residentd.conf \
	units/residentd.tmpfiles:$(VENDORDIR)/tmpfiles.d/residentd.conf \
	units/org.residentd1.service:$(DATADIR)/dbus-1/system-services/org.residentd1.service \
	policy/org.residentd1.conf:$(DATADIR)/dbus-1/system.d/org.residentd1.conf \
	policy/org.residentd1.xml:$(DATADIR)/dbus-1/interfaces/org.residentd1.xml \
	policy/org.residentd1.policy:$(DATADIR)/polkit-1/actions/org.residentd1.policy \
	policy/policy.d/10-example.conf:$(DATADIR)/residentd/policy.d/10-example.conf \
	policy/apparmor/usr.sbin.residentd:$(SYSCONFDIR)/apparmor.d/usr.sbin.residentd \
	packaging/catalog/residentd.catalog:$(VENDORDIR)/systemd/catalog/residentd.catalog \
	policy/residentd.conf:$(VENDORDIR)/residentd/residentd.conf

install-service: $(UNITS)
	$(INSTALL) -d $(DESTDIR)$(SYSCONFDIR)/residentd/residentd.conf.d $(DESTDIR)$(SYSCONFDIR)/residentd/policy.d
	for f in $(SERVICE_FILES); do $(INSTALL) -D -m 0644 $${f%%:*} $(DESTDIR)$${f##*:} || exit 1; done

uninstall:
	rm -f $(addprefix $(DESTDIR)$(BINDIR)/,resident residentctl) $(DESTDIR)$(SBINDIR)/residentd
	rm -rf $(DESTDIR)$(LIBEXECDIR)/residentd
	rm -f $(addprefix $(DESTDIR)$(LIBDIR)/,libresident.so libresident.so.$(SOVERSION) libresident.a pkgconfig/libresident.pc)
	rm -f $(addprefix $(DESTDIR)$(INCLUDEDIR)/,resident.h resident-control.h)
	rm -f $(foreach f,$(SERVICE_FILES),$(DESTDIR)$(lastword $(subst :, ,$(f))))
	rm -rf $(DESTDIR)$(DATADIR)/residentd $(addprefix $(DESTDIR)$(DATADIR)/doc/residentd/,MODEL_CARD.md examples)
	rm -f $(addprefix $(DESTDIR)$(BASHDIR)/,$(patsubst %.bash,%,$(filter-out _%,$(COMPLETIONS))))
	rm -f $(addprefix $(DESTDIR)$(ZSHDIR)/,$(filter _%,$(COMPLETIONS)))
	rm -f $(foreach m,$(notdir $(MAN)),$(DESTDIR)$(MANDIR)/man$(patsubst .%,%,$(suffix $(m)))/$(m))

# The package is built in a copy of the tree, as a distribution would: nothing of it lands here but the results. Tests
# have a target of their own.
.PHONY: deb
deb:
	@packaging/deps build package
	rm -rf $(O)/deb
	mkdir -p $(O)/deb/src
	tar -c --exclude-vcs --exclude=./build --exclude=./$(O) --exclude=__pycache__ . | tar -x -C $(O)/deb/src
	ln -s packaging/debian $(O)/deb/src/debian
	cd $(O)/deb/src && env -u MAKEFLAGS -u MAKELEVEL -u MFLAGS -u O DEB_BUILD_OPTIONS="nocheck $$DEB_BUILD_OPTIONS" \
		dpkg-buildpackage -us -uc -b -j2
	lintian --fail-on warning --info --tag-display-limit 0 $(O)/deb/*.changes
	@ls -l $(O)/deb/*.deb

.PHONY: clean help
clean:
	rm -rf $(O)

help:
	@echo 'make              build everything into $(O)/'
	@echo 'make demo         install what is missing, build, ask a private residentd one question'
	@echo 'make check        install what is missing, build, run every test'
	@echo 'make asan         the same tests under AddressSanitizer and UBSan (build/asan)'
	@echo 'make integration  the service on a real systemd in a container; integration-vm: in a virtual machine (root)'
	@echo 'make parity       compare the engine with an independent implementation'
	@echo 'make fuzz         each fuzz target for FUZZ_SECONDS=$(FUZZ_SECONDS) with clang libFuzzer (build/fuzz)'
	@echo 'make CUDA=no      without the GPU kernels (nvcc takes a minute for them); their tests run all the same, on an emulated driver'
	@echo 'make bench        speed and memory beside llama.cpp (npm; ours alone without), kernels, tokenizer: ten minutes, a quiet machine'
	@echo 'make profile      where the time of a prompt and of an answer goes (perf); both take ARGS="--model FILE ..."'
	@echo 'make bench-residency  less memory than the model has, beside llama.cpp (root, minutes; needs the peer, see tests/parity/setup)'
	@echo 'make deps         install the packages that building, testing and developing need'
	@echo 'make format       clang-format in place; format-check only looks'
	@echo 'make lint         check the manual pages'
	@echo 'make install      into DESTDIR, PREFIX=$(PREFIX), LIBDIR=$(LIBDIR); uninstall removes it'
	@echo 'make deb          Debian packages, in $(O)/deb'
	@echo 'make clean        remove $(O)/'
	@echo
	@echo 'Variables: O V=1 CC CFLAGS LDFLAGS SANITIZE=address,undefined WERROR=1 PREFIX DESTDIR LIBDIR FUZZ_SECONDS TEST_TIMEOUT ARGS'
	@echo 'ARM_CC=aarch64-linux-gnu-gcc: also builds the kernels for ARM, whose tests an emulator runs (packaging/deps arm)'

-include $(shell find $(O)/obj $(O)/pic $(O)/aarch64 -name '*.d' 2>/dev/null)
