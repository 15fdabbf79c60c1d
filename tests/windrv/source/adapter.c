/* Finds a device, starts its driver as StorPort does, and stops it. */
#include "port.h"

u32 active_processors = 1;
/* The argument of StorPortInitialize in DriverEntry. */
HW_INITIALIZATION_DATA announced;
static Adapter *adapters[MAX_ADAPTERS];

Adapter *adapter_of(PVOID extension)
{
    for (int i = 0; i < MAX_ADAPTERS; i++)
        if (adapters[i] && adapters[i]->extension == extension)
            return adapters[i];
    print("fail port: a driver passes an extension of no adapter\n");
    machine_end();
    return NULL;
}

/* There is one processor, and handlers run only while the checks wait. Taking a lock twice, which
 * is a deadlock in Windows, is counted here. */
void lock(Adapter *adapter, int *which)
{
    adapter->calls.lock_errors += *which != 0;
    *which = 1;
}

void unlock(Adapter *adapter, int *which)
{
    adapter->calls.lock_errors += *which == 0;
    *which = 0;
}

static int add(Adapter *adapter)
{
    for (int i = 0; i < MAX_ADAPTERS; i++)
        if (!adapters[i]) {
            adapters[i] = adapter;
            return 1;
        }
    return 0;
}

static void find_ranges(Adapter *adapter)
{
    PciBar bars[6];
    u32 count = pci_bars(adapter->pci, bars);
    for (u32 i = 0; i < count; i++) {
        adapter->ranges[i].RangeStart.QuadPart = bars[i].address;
        adapter->ranges[i].RangeLength = bars[i].length;
        adapter->ranges[i].RangeInMemory = !bars[i].io;
    }
    adapter->config.NumberOfAccessRanges = count;
    adapter->config.AccessRanges = (void *)adapter->ranges;
    messages_find(&adapter->interrupts, adapter->pci, bars, count);
}

static void fill_configuration(Adapter *adapter)
{
    PORT_CONFIGURATION_INFORMATION *config = &adapter->config;
    config->Length = sizeof *config;
    config->AdapterInterfaceType = PCIBus;
    config->SlotNumber = adapter->pci.device | adapter->pci.function << 5;
    config->InterruptMode = adapter->mode.messages ? Latched : LevelSensitive;
    config->MaximumTransferLength = SP_UNINITIALIZED_VALUE;
    config->NumberOfPhysicalBreaks = SP_UNINITIALIZED_VALUE;
    config->DeviceExtensionSize = adapter->hw.DeviceExtensionSize;
    config->SrbExtensionSize = adapter->hw.SrbExtensionSize;
    config->SrbType = 1; /* STORAGE_REQUEST_BLOCK */
    config->Dma64BitAddresses = SCSI_DMA64_SYSTEM_SUPPORTED;
    config->MapBuffers = adapter->hw.MapBuffers;
    config->NeedPhysicalAddresses = adapter->hw.NeedPhysicalAddresses;
}

const char *adapter_start(Adapter *adapter, PciAddress where, DriverEntry *entry, Mode mode)
{
    static WCHAR registry_path[] = L"registry";
    memset(adapter, 0, sizeof *adapter);
    memset(&announced, 0, sizeof announced);
    adapter->mode = mode;
    adapter->pci = where;
    active_processors = mode.processors;
    /* Windows passes no registry path to the driver that writes a dump. */
    if (entry(adapter, mode.polled ? NULL : registry_path) || !announced.HwFindAdapter)
        return "DriverEntry";
    adapter->hw = announced;
    adapter->extension = allocate(adapter->hw.DeviceExtensionSize, 64);
    if (!add(adapter))
        return "the list of adapters";
    fill_configuration(adapter);
    find_ranges(adapter);
    messages_start(&adapter->interrupts, mode.messages, mode.polled);
    BOOLEAN again = FALSE;
    ULONG found =
        adapter->hw.HwFindAdapter(adapter->extension, NULL, NULL, NULL, &adapter->config, &again);
    if (found != SP_RETURN_FOUND)
        return "HwFindAdapter";
    lock(adapter, &adapter->start_lock);
    BOOLEAN initialized = adapter->hw.HwInitialize(adapter->extension);
    unlock(adapter, &adapter->start_lock);
    if (!initialized)
        return "HwInitialize";
    if (adapter->passive && !adapter->passive(adapter->extension))
        return "HwPassiveInitializeRoutine";
    return NULL;
}

void adapter_stop(Adapter *adapter)
{
    messages_stop(&adapter->interrupts);
    for (int i = 0; i < MAX_ADAPTERS; i++)
        if (adapters[i] == adapter)
            adapters[i] = NULL;
}
