/* stdvga's code for its hardware, on the display. The rest of this driver serves Windows' graphics
 * kernel, and reaches the hardware through the functions that are called here. */
#include "hw.h"
extern "C" {
#include "../source/machine.h"
void pages_find(void);
u32 pool_blocks(void);
u32 pool_damaged(void);
void display_run(void);
}

enum { ID = STDVGA_PCI_DEVICE_ID << 16 | STDVGA_PCI_VENDOR_ID };
/* The aperture of VGA, which Windows gives to a display, too. */
enum { APERTURE = 0xa0000, APERTURE_LENGTH = 0x20000 };
/* A size whose width the driver rounds up. */
enum { ODD_WIDTH = 1366, ODD_HEIGHT = 768 };
enum { SECONDS = 120 };

static STDVGA_HW_CONTEXT context;
static u32 pictures;

static void add(CM_PARTIAL_RESOURCE_LIST *to, u64 address, u64 length)
{
    CM_PARTIAL_RESOURCE_DESCRIPTOR *it = &to->PartialDescriptors[to->Count++];
    it->Type = CmResourceTypeMemory;
    it->u.Memory.Start.QuadPart = address;
    it->u.Memory.Length = length;
}

/* Starts the driver with its BARs, or with the frame buffer alone. */
static NTSTATUS start(PciAddress where, int alone)
{
    static union {
        CM_RESOURCE_LIST list;
        u8 bytes[sizeof(CM_RESOURCE_LIST) + 8 * sizeof(CM_PARTIAL_RESOURCE_DESCRIPTOR)];
    } resources;
    PciBar bars[6];
    u32 count = pci_bars(where, bars);
    CM_PARTIAL_RESOURCE_LIST *to = &resources.list.List[0].PartialResourceList;
    resources.list.Count = 1;
    to->Count = 0;
    add(to, APERTURE, APERTURE_LENGTH);
    for (u32 i = 0; i < count; i++)
        if (!bars[i].io && (!alone || bars[i].number == STDVGA_BAR_FRAMEBUFFER))
            add(to, bars[i].address, bars[i].length);
    return StdVgaHwInit(&context, &resources.list);
}

/* Paints each pixel by its place and the number of the picture. The host compares the whole screen
 * with the same function, and then presses the power button. */
static int paint(const char *name)
{
    USHORT width, height;
    StdVgaHwGetCurrentMode(&context, &width, &height);
    if (width != context.CurrentWidth || height != context.CurrentHeight) {
        check(0, name, "the device has %ux%u, not %ux%u", width, height, context.CurrentWidth,
              context.CurrentHeight);
        return 0;
    }
    pictures++;
    u32 *at = (u32 *)StdVgaHwGetFrameBuffer(&context);
    for (u32 y = 0; y < height; y++)
        for (u32 x = 0; x < width; x++)
            *at++ = (x & 0xff) << 16 | (y & 0xff) << 8 | pictures;
    print("host: screen %u %u %u\n", width, height, pictures);
    u64 end = microseconds() + SECONDS * 1000000ull;
    while (!power_button())
        if (microseconds() > end) {
            check(0, name, "the host did not answer");
            return 0;
        }
    check(1, name, "%ux%u", width, height);
    return 1;
}

static void modes(void)
{
    for (ULONG i = 0; i < context.ModeCount; i++) {
        STDVGA_MODE *mode = &context.pModeList[i];
        NTSTATUS status = StdVgaHwSetMode(&context, mode->Width, mode->Height);
        if (status)
            check(0, "mode", "%ux%u: %x", mode->Width, mode->Height, status);
        else if (!paint("mode"))
            return;
    }
}

/* After a mode was set once more, the picture is still there, until the driver erases it. */
static void erase(void)
{
    u32 *at = (u32 *)StdVgaHwGetFrameBuffer(&context), wrong = 0;
    StdVgaHwSetMode(&context, ODD_WIDTH, ODD_HEIGHT);
    if (!paint("odd"))
        return;
    check(context.CurrentWidth == ODD_WIDTH + 2, "odd.stride", "%u", context.CurrentWidth);
    u32 last = context.CurrentWidth * ODD_HEIGHT - 1, before = at[last];
    StdVgaHwSetMode(&context, ODD_WIDTH, ODD_HEIGHT);
    check(at[last] == before && before, "kept", "%x, before %x", at[last], before);
    StdVgaHwBlackOut(&context);
    for (u32 i = 0; i <= last; i++)
        wrong += at[i] != 0;
    check(!wrong, "black", "wrong=%u", wrong);
}

static void refusals(PciAddress where)
{
    NTSTATUS status = StdVgaHwSetMode(&context, 8192, 8192);
    check(status == STATUS_GRAPHICS_INVALID_VIDEO_PRESENT_SOURCE_MODE, "too_large", "%x", status);
    StdVgaHwClose(&context);
    /* There are no registers at the ports of QEMU's VGA, which the driver then tries. */
    status = start(where, 1);
    check(status == STATUS_DEVICE_CONFIGURATION_ERROR, "without_registers", "%x", status);
}

void display_run(void)
{
    PciAddress where;
    set_prefix("stdvga", "modes");
    if (!wanted("driver", "stdvga") || !wanted("mode", "modes") || !pci_find(ID, &where))
        return;
    pages_find();
    power_button_enable();
    u32 blocks = pool_blocks();
    /* The second time, the registers are elsewhere, as after a move of BARs by Windows. */
    for (u32 turn = 0; turn < 2; turn++) {
        int moved = !turn || bars_move(where, turn);
        NTSTATUS status = start(where, 0);
        check(!status && moved, "start",
              "status=%x moved=%d slot=%02x memory=%llu modes=%u registers=%llx", status, moved,
              where.device, (u64)context.VramSize, (u32)context.ModeCount,
              (u64)context.MmioPA.QuadPart);
        if (status)
            return;
        if (!turn) {
            modes();
            erase();
        } else {
            StdVgaHwSetMode(&context, 1024, 768);
            paint("moved");
        }
        refusals(where);
    }
    check(pool_blocks() == blocks && !pool_damaged(), "memory", "left=%u", pool_blocks() - blocks);
}
