/* Finds a device, starts its driver as StorPort does, and stops it. */
#include "port.h"

enum { VIRTIO_VENDOR = 0x1af4, QEMU_SUBSYSTEM = 0x1100, MODERN_REVISION = 1 };

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

int adapter_find(u16 device, PciAddress *where)
{
    for (u8 number = 0; number < 32; number++) {
        PciAddress at = {number, 0};
        if (pci_read(at, PCI_ID) != (VIRTIO_VENDOR | (u32)device << 16))
            continue;
        *where = at;
        int subsystem = pci_read(at, PCI_SUBSYSTEM) >> 16 == QEMU_SUBSYSTEM;
        return subsystem && (pci_read(at, PCI_REVISION) & 0xff) == MODERN_REVISION ? 2 : 1;
    }
    return 0;
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

/* Lists the BARs, and finds the MSI-X table in them. */
static void find_ranges(Adapter *adapter)
{
    PORT_CONFIGURATION_INFORMATION *config = &adapter->config;
    Interrupts *interrupts = &adapter->interrupts;
    u32 count = 0, table = 0;
    u32 command = pci_read(adapter->pci, PCI_COMMAND) & 0xffff;
    pci_write(adapter->pci, PCI_COMMAND, command & ~COMMAND_ON);
    interrupts->capability = pci_capability(adapter->pci, 0x11);
    if (interrupts->capability) {
        u32 control = pci_read(adapter->pci, interrupts->capability);
        interrupts->table_size = (control >> 16 & 0x7ff) + 1;
        table = pci_read(adapter->pci, interrupts->capability + 4);
    }
    for (int bar = 0; bar < 6; bar++) {
        u64 length, address = pci_bar(adapter->pci, bar, &length);
        u32 low = pci_read(adapter->pci, PCI_BAR0 + 4 * bar);
        if (length) {
            ACCESS_RANGE *range = &adapter->ranges[count++];
            range->RangeStart.QuadPart = address;
            range->RangeLength = length;
            range->RangeInMemory = !(low & 1);
            if (interrupts->capability && bar == (int)(table & 7))
                interrupts->table =
                    map_device(address + (table & ~7u), interrupts->table_size * 16);
        }
        if ((low & 7) == 4)
            bar++;
    }
    pci_write(adapter->pci, PCI_COMMAND, COMMAND_ON);
    config->NumberOfAccessRanges = count;
    config->AccessRanges = (void *)adapter->ranges;
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
    messages_start(adapter);
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
    u8 capability = adapter->interrupts.capability;
    if (capability) {
        u32 control = pci_read(adapter->pci, capability);
        pci_write(adapter->pci, capability, control & 0x3fffffff);
    }
    pci_write(adapter->pci, PCI_COMMAND, COMMAND_NO_INTX);
    for (int i = 0; i < MAX_ADAPTERS; i++)
        if (adapters[i] == adapter)
            adapters[i] = NULL;
}
