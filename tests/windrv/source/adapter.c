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

/* A lock that this processor has already is a deadlock in Windows, and counted here. */
void lock(Adapter *adapter, int *which)
{
    if (!spin_lock(which))
        COUNT(adapter->calls.lock_errors);
}

void unlock(Adapter *adapter, int *which)
{
    if (!spin_unlock(which))
        COUNT(adapter->calls.lock_errors);
}

void lock_interrupts(Adapter *adapter)
{
    lock(adapter, &adapter->interrupt_lock);
    for (u32 message = 0; message < adapter->interrupts.messages; message++)
        lock(adapter, &adapter->message_lock[message]);
}

void unlock_interrupts(Adapter *adapter)
{
    for (u32 message = adapter->interrupts.messages; message--;)
        unlock(adapter, &adapter->message_lock[message]);
    unlock(adapter, &adapter->interrupt_lock);
}

void lock_channels(Adapter *adapter)
{
    for (u32 channel = 0; channel < PROCESSORS; channel++)
        lock(adapter, &adapter->start_lock[channel]);
}

void unlock_channels(Adapter *adapter)
{
    for (u32 channel = PROCESSORS; channel--;)
        unlock(adapter, &adapter->start_lock[channel]);
}

/* The idle work of the processors that run no checks. */
static int poll_adapters(void)
{
    int any = 0;
    for (int i = 0; i < MAX_ADAPTERS; i++)
        if (adapters[i] && adapters[i]->mode.together)
            any |= poll_adapter(adapters[i]);
    return any;
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
    adapter->stopped = 1;
    adapter->interrupts.processors = mode.together ? mode.processors : 1;
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
    lock_channels(adapter);
    BOOLEAN initialized = adapter->hw.HwInitialize(adapter->extension);
    unlock_channels(adapter);
    if (!initialized)
        return "HwInitialize";
    if (adapter->passive && !adapter->passive(adapter->extension))
        return "HwPassiveInitializeRoutine";
    adapter->stopped = 0;
    processors_idle(poll_adapters);
    return NULL;
}

void adapter_stop(Adapter *adapter)
{
    processors_hold();
    adapter->stopped = 1;
    messages_stop(&adapter->interrupts);
    for (int i = 0; i < MAX_ADAPTERS; i++)
        if (adapters[i] == adapter)
            adapters[i] = NULL;
    processors_release();
}
