/* Intel's network card beside NetKVM, in the mode without messages. Without such a card, nothing
 * happens. */
#ifndef WINDRV_INTEL_H
#define WINDRV_INTEL_H
#include "shim.h"

void intel_start(void);
/* Around each check of NetKVM: the card is busy during every second one, so that NetKVM depends on
 * its own interrupts during the others. */
void intel_begin(u32 check);
void intel_end(void);
/* Checks what the card has done. */
void intel_stop(void);
/* Whether this is its interrupt line, and whether a device has the same one. */
int intel_has_line(u32 pin);
int intel_shares_line(PciAddress with);
/* The handler of its interrupts; whether the card has one. */
int intel_service(void);
#endif
