/* SPDX-License-Identifier: MIT */
/*
 * messages.h: the identities of what an administrator may want to find in the journal.
 *
 * Each is a whole field for log_fields(); packaging/catalog/residentd.catalog has the text that `journalctl -x` shows
 * under a line which carries it, with the values of the other fields that are named here. Owns numbers only.
 * Invariant: an identity never changes its meaning; what means something else gets a new one
 * (`systemd-id128 new`), and every one stands in both files.
 */
#pragma once

#define MESSAGE_ID_STARTED         "MESSAGE_ID=f2c27b1c41411ae8ce418b8de033b014"
#define MESSAGE_ID_STOPPING        "MESSAGE_ID=e21733e7c125abcfa6c8b4b2f605935b"
#define MESSAGE_ID_MODEL_LOADED    "MESSAGE_ID=331df4b9ed42832afef78517c07ed91d" /* MODEL= */
#define MESSAGE_ID_MODEL_FAILED    "MESSAGE_ID=3e818788578b3755efbf1e57954af1e5" /* MODEL= */
#define MESSAGE_ID_SESSION_LIMIT   "MESSAGE_ID=dc768e72d262e625ff5e16e00ff6b86e" /* UID= */
#define MESSAGE_ID_QUOTA_EXCEEDED  "MESSAGE_ID=b97ddc4a4fff4f6b3103e47c5091c01e" /* UID= */
#define MESSAGE_ID_POLICY_RELOADED "MESSAGE_ID=01f7586f324a31f880a7cdc0b2a7fab1"
