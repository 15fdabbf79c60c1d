/* Intel's network card beside NetKVM. Without such a card, nothing happens. */
#ifndef WINDRV_INTEL_H
#define WINDRV_INTEL_H
#include "shim.h"

/* The card sends and receives from here on, as long as its interrupts are served. */
void intel_start(void);
/* Checks what it has done. */
void intel_stop(void);
/* Whether this is its interrupt line, and whether a device has the same one. */
int intel_has_line(u32 pin);
int intel_shares_line(PciAddress with);
/* The handler of its interrupts; whether the card has one. */
int intel_service(void);
#endif
