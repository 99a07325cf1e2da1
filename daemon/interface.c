/* SPDX-License-Identifier: MIT */
/*
 * interface.c: the interface texts that introspection returns: ours from policy/org.residentd.varlink, word for word, and the standard one.
 * Data only.
 */
#include "daemon/methods.h"

__asm__(".section .rodata\n"
	".global interface_inference\n"
	"interface_inference:\n"
	".incbin \"policy/org.residentd.varlink\"\n"
	".byte 0\n"
	".previous\n");

const char interface_service[] =
	"# The Varlink service interface: every service has it.\n"
	"interface org.varlink.service\n"
	"\n"
	"method GetInfo() -> (\n"
	"  vendor: string,\n"
	"  product: string,\n"
	"  version: string,\n"
	"  url: string,\n"
	"  interfaces: []string\n"
	")\n"
	"\n"
	"method GetInterfaceDescription(interface: string) -> (description: string)\n"
	"\n"
	"error InterfaceNotFound (interface: string)\n"
	"error MethodNotFound (method: string)\n"
	"error MethodNotImplemented (method: string)\n"
	"error InvalidParameter (parameter: string)\n"
	"error PermissionDenied ()\n"
	"error ExpectedMore ()\n";
