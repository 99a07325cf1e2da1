/* SPDX-License-Identifier: MIT */
/*
 * install.h: `residentctl model`: the models directory as its users see it. Main thread.
 */
#pragma once

#include "client/ctl.h"

enum exit_code install_list(struct ctl *c);
enum exit_code install_add(struct ctl *c);     /* FILE; --name, --default */
enum exit_code install_show(struct ctl *c);    /* NAME */
enum exit_code install_remove(struct ctl *c);  /* NAME; --force */
enum exit_code install_default(struct ctl *c); /* NAME */
