/* PCI configuration space, BARs, capabilities, and the mapping of device memory. */
#include "machine.h"

enum { CONFIG_ADDRESS = 0xcf8, CONFIG_DATA = 0xcfc, CONFIG_ENABLE = 1u << 31 };
enum { BAR_IO = 1, BAR_TYPE = 7, BAR_64_BIT = 4 };
enum { LARGE_PAGE = 2 << 20, PRESENT = 1, PAGE_TABLE = 7, RAM_PAGE = 0x87, DEVICE_PAGE = 0x9f };

enum { VIRTIO_VENDOR = 0x1af4, QEMU_SUBSYSTEM = 0x1100, MODERN_REVISION = 1 };

extern u64 page_map[512];

static void select_register(PciAddress where, u32 at)
{
    out32(CONFIG_ADDRESS, CONFIG_ENABLE | where.device << 11 | where.function << 8 | (at & 0xfc));
}

u32 pci_read(PciAddress where, u32 at)
{
    select_register(where, at);
    return in32(CONFIG_DATA);
}

void pci_write(PciAddress where, u32 at, u32 value)
{
    select_register(where, at);
    out32(CONFIG_DATA, value);
}

/* The writable bits of a register, found by writing ones; the old value is restored. */
static u32 writable_bits(PciAddress where, u32 at)
{
    u32 before = pci_read(where, at);
    pci_write(where, at, ~0u);
    u32 bits = pci_read(where, at);
    pci_write(where, at, before);
    return bits;
}

u64 pci_bar(PciAddress where, int number, u64 *length)
{
    u32 at = PCI_BAR0 + 4 * number, low = pci_read(where, at), high = 0;
    u32 flags = low & BAR_IO ? 3 : 15;
    u64 mask = writable_bits(where, at) & ~flags;
    if ((low & BAR_TYPE) == BAR_64_BIT) {
        high = pci_read(where, at + 4);
        mask |= (u64)writable_bits(where, at + 4) << 32;
    } else if (mask) {
        mask |= ~0ull << 32;
    }
    if (low & BAR_IO)
        mask |= mask ? 0xffff0000 : 0;
    *length = mask ? ~mask + 1 : 0;
    return (low & ~flags) | (u64)high << 32;
}

u32 pci_bars(PciAddress where, PciBar bars[6])
{
    u32 count = 0, command = pci_read(where, PCI_COMMAND) & 0xffff;
    pci_write(where, PCI_COMMAND, command & ~COMMAND_ON);
    for (int number = 0; number < 6; number++) {
        PciBar *bar = &bars[count];
        u32 low = pci_read(where, PCI_BAR0 + 4 * number);
        bar->address = pci_bar(where, number, &bar->length);
        bar->number = number;
        bar->io = low & BAR_IO;
        count += bar->length != 0;
        number += (low & BAR_TYPE) == BAR_64_BIT;
    }
    pci_write(where, PCI_COMMAND, COMMAND_ON);
    return count;
}

u8 pci_capability(PciAddress where, u8 id)
{
    u8 at = pci_read(where, PCI_CAPABILITIES);
    /* At most 48 capabilities fit into configuration space: a longer list is a loop. */
    for (int i = 0; at && i < 48; i++) {
        u32 header = pci_read(where, at);
        if ((header & 0xff) == id)
            return at;
        at = header >> 8;
    }
    return 0;
}

int pci_find(u32 id, PciAddress *where)
{
    for (where->device = where->function = 0; where->device < 32; where->device++)
        if (pci_read(*where, PCI_ID) == id)
            return 1;
    return 0;
}

int virtio_find(u16 device, PciAddress *where)
{
    if (!pci_find(VIRTIO_VENDOR | (u32)device << 16, where))
        return 0;
    int subsystem = pci_read(*where, PCI_SUBSYSTEM) >> 16 == QEMU_SUBSYSTEM;
    return subsystem && (pci_read(*where, PCI_REVISION) & 0xff) == MODERN_REVISION ? 2 : 1;
}

/* entry.S maps the first 4 GiB. Above, this adds a page of 2 MiB where needed; none is removed. */
static void *map(u64 address, u64 length, u64 flags)
{
    static u64 tables[32][512] __attribute__((aligned(4096)));
    static u32 used;
    for (u64 at = address & -(u64)LARGE_PAGE; at < address + length; at += LARGE_PAGE) {
        if (at < 1ull << 32)
            continue;
        u64 *table = page_map;
        for (int shift = 39; shift > 21; shift -= 9) {
            u64 *entry = &table[at >> shift & 511];
            if (!(*entry & PRESENT)) {
                if (used == sizeof tables / sizeof *tables) {
                    print("fail memory: no page tables are left\n");
                    machine_end();
                }
                *entry = (u64)tables[used++] | PAGE_TABLE;
            }
            table = (u64 *)(*entry & ~0xfffull);
        }
        table[at >> 21 & 511] = at | flags;
    }
    return (void *)address;
}

void *map_device(u64 address, u64 length)
{
    return map(address, length, DEVICE_PAGE);
}

void *map_memory(u64 address, u64 length)
{
    return map(address, length, RAM_PAGE);
}
