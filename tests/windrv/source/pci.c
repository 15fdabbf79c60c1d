/* PCI configuration space, BARs, capabilities, and the mapping of device memory. */
#include "machine.h"

enum { CONFIG_ADDRESS = 0xcf8, CONFIG_DATA = 0xcfc, CONFIG_ENABLE = 1u << 31 };
enum { BAR_IO = 1, BAR_TYPE = 7, BAR_64_BIT = 4 };
enum { LARGE_PAGE = 2 << 20, PRESENT = 1, PAGE_TABLE = 7, DEVICE_PAGE = 0x9f };

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

/* entry.S maps the first 4 GiB. Above, this adds a page of 2 MiB where needed; none is removed. */
void *map_device(u64 address, u64 length)
{
    static u64 tables[16][512] __attribute__((aligned(4096)));
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
        table[at >> 21 & 511] = at | DEVICE_PAGE;
    }
    return (void *)address;
}
