/* Compiled into each KMDF driver, between it and its library: the causes that the ISR byte names,
 * because an interrupt of a queue hides a missing one of the configuration. */
#include "osdep.h"
#include "virtio_pci.h"
#include "VirtIOWdf.h"

/* In kmdf/device.c. */
void cause_seen(UCHAR status);

/* The library's function, which `build` renames. */
UCHAR library_VirtIOWdfGetISRStatus(PVIRTIO_WDF_DRIVER driver);

UCHAR VirtIOWdfGetISRStatus(PVIRTIO_WDF_DRIVER driver)
{
    UCHAR status = library_VirtIOWdfGetISRStatus(driver);
    cause_seen(status);
    return status;
}
