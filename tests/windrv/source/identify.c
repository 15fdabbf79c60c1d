/* Checks: the commands with which the class driver identifies a disk, and optional ones. */
#include "disk.h"

enum { PAGE_LENGTH = 255, VENDOR_OPCODE = 0xc1, ABSENT_PAGE = 0xc5, NO_LUN_TYPE = 0x7f };
enum { READ_CAPACITY_16 = 0x10, REPORT_SUPPORTED_OPERATIONS = 0x0c, EVPD = 1 };
enum { INVALID_OPCODE = 0x052000, LBA_OUT_OF_RANGE = 0x052100, INVALID_FIELD = 0x052400 };

static int read_page(u8 page)
{
    return command(FROM_DISK, PAGE_LENGTH, 6, SCSIOP_INQUIRY, EVPD, page, 0, PAGE_LENGTH, 0);
}

static void page_serial(int good, const char *name)
{
    u8 length = scratch[3] < 40 ? scratch[3] : 40;
    scratch[4 + length] = 0;
    check(good && length, name, "length=%u serial=\"%s\"", answer.length, scratch + 4);
}

static void page_limits(int good, const char *name)
{
    u32 unmap = from_big_endian(scratch + 20, 4), descriptors = from_big_endian(scratch + 24, 4);
    disk.unmap_ranges = descriptors < 4 ? descriptors : 4;
    if (disk.scsi)
        disk.discard = unmap && descriptors;
    check(good, name, "length=%u granularity=%u longest=%u unmap=%u descriptors=%u grain=%u",
          answer.length, (u32)from_big_endian(scratch + 6, 2), (u32)from_big_endian(scratch + 8, 4),
          unmap, descriptors, (u32)from_big_endian(scratch + 28, 4));
}

static void page_provisioning(int good, const char *name)
{
    u32 unmap = scratch[5] >> 7;
    if (!disk.scsi)
        disk.discard = unmap;
    check(good, name, "length=%u unmap=%u type=%u", answer.length, unmap, scratch[6] & 7);
}

static void vital_product_data(u8 page)
{
    char name[] = "vpd.00";
    name[4] = "0123456789abcdef"[page >> 4];
    name[5] = "0123456789abcdef"[page & 15];
    int good = read_page(page);
    /* viostor leaves out the page code of these two. */
    good = good && (scratch[1] == page || (!disk.scsi && (page == 0xb0 || page == 0xb2)));
    if (page == VPD_SERIAL_NUMBER)
        page_serial(good, name);
    else if (page == VPD_BLOCK_LIMITS)
        page_limits(good, name);
    else if (page == VPD_LOGICAL_BLOCK_PROVISIONING)
        page_provisioning(good, name);
    else
        check(good, name, "status=%02x length=%u", answer.status, answer.length);
}

void inquiry(void)
{
    int good = command(FROM_DISK, 96, 6, SCSIOP_INQUIRY, 0, 0, 0, 96, 0);
    char product[29] = {0};
    for (int i = 0; i < 28; i++)
        product[i] = scratch[8 + i] >= 32 && scratch[8 + i] < 127 ? scratch[8 + i] : '.';
    check(good && scratch[0] == 0, "inquiry", "status=%02x type=%02x version=%u \"%s\"",
          answer.status, scratch[0], scratch[2], product);

    good = read_page(VPD_SUPPORTED_PAGES);
    u8 list[32];
    u32 count = scratch[3], listed = count < sizeof list ? count : sizeof list;
    memcpy(list, scratch + 4, listed);
    check(good && scratch[1] == 0 && count >= 3, "vpd", "pages=%u", count);
    for (u32 i = 1; i < listed; i++)
        vital_product_data(list[i]);
    read_page(ABSENT_PAGE);
    check(answer.complete && (!disk.scsi || answer.sense == INVALID_FIELD), "vpd.none",
          "status=%02x sense=%06x", answer.status, answer.sense);
}

void capacity(void)
{
    int good = command(FROM_DISK, 8, 10, SCSIOP_READ_CAPACITY, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    u64 last = from_big_endian(scratch, 4);
    u32 block = from_big_endian(scratch + 4, 4);
    check(good && block, "capacity10", "last=%llu block=%u", last, block);
    good = command(FROM_DISK, 32, 16, SCSIOP_READ_CAPACITY16, READ_CAPACITY_16, 0, 0, 0, 0, 0, 0, 0,
                   0, 0, 0, 0, 32, 0, 0);
    u64 last16 = from_big_endian(scratch, 8);
    u32 block16 = from_big_endian(scratch + 8, 4);
    int same = (last16 == last || last == 0xffffffff) && block16 == block;
    check(good && same, "capacity16", "last=%llu block=%u exponent=%u unmap=%u zeros=%u", last16,
          block16, scratch[13] & 15, scratch[14] >> 7, scratch[14] >> 6 & 1);
    disk.block = block ? block : 512;
    disk.blocks = last16 + 1;
    disk.region = REGION / disk.block < disk.blocks ? REGION / disk.block : disk.blocks;
}

void class_commands(void)
{
    int good = command(0, 0, 6, SCSIOP_TEST_UNIT_READY, 0, 0, 0, 0, 0);
    check(good, "ready", "status=%02x sense=%06x", answer.status, answer.sense);
    good = command(FROM_DISK, 64, 12, SCSIOP_REPORT_LUNS, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0);
    u32 list = from_big_endian(scratch, 4);
    check(good && list >= 8, "luns", "status=%02x list=%u", answer.status, list);
    good = command(0, 0, 6, SCSIOP_MEDIUM_REMOVAL, 0, 0, 0, 1, 0);
    u8 first = answer.status;
    good = command(0, 0, 6, SCSIOP_MEDIUM_REMOVAL, 0, 0, 0, 0, 0) && good;
    check(good || disk.scsi, "removal", "status=%02x %02x sense=%06x", first, answer.status,
          answer.sense);
    good = command(0, 0, 6, SCSIOP_START_STOP_UNIT, 0, 0, 0, 1, 0);
    check(good, "start_unit", "status=%02x sense=%06x", answer.status, answer.sense);
    good = command(0, 0, 10, SCSIOP_VERIFY, 0, 0, 0, 0, 0, 0, 0, 8, 0);
    check(good, "verify", "status=%02x sense=%06x", answer.status, answer.sense);
    good = command(FROM_DISK, 18, 6, SCSIOP_REQUEST_SENSE, 0, 0, 0, 18, 0);
    check(good, "request_sense", "status=%02x key=%u", answer.status, scratch[2] & 15);
}

/* An optional command must complete exactly once, with any result. */
static void check_answered(const char *name)
{
    check(answer.complete, name, "status=%02x sense=%06x length=%u", answer.status, answer.sense,
          answer.length);
}

void optional_commands(void)
{
    command(FROM_DISK, 64, 10, SCSIOP_LOG_SENSE, 0, 0x40, 0, 0, 0, 0, 0, 64, 0);
    check_answered("log_sense");
    command(FROM_DISK, 64, 10, SCSIOP_PERSISTENT_RESERVE_IN, 0, 0, 0, 0, 0, 0, 0, 64, 0);
    check_answered("reservations");
    command(FROM_DISK, 64, 12, SCSIOP_MAINTENANCE_IN, REPORT_SUPPORTED_OPERATIONS, 0x80, 0, 0, 0, 0,
            0, 0, 64, 0, 0);
    check_answered("operations");
    command(FROM_DISK, 192, 10, SCSIOP_MODE_SENSE10, 8, MODE_PAGE_CACHING, 0, 0, 0, 0, 0, 192, 0);
    check_answered("mode10");
    int good = command(0, 0, 6, VENDOR_OPCODE, 0, 0, 0, 0, 0);
    check(answer.complete && !good && (!disk.scsi || answer.sense == INVALID_OPCODE), "unknown",
          "status=%02x sense=%06x", answer.status, answer.sense);
}

void absent_addresses(void)
{
    /* The block after the last one. */
    u8 lba[8];
    big_endian(lba, disk.blocks, 8);
    int good = command(FROM_DISK, disk.block, 16, SCSIOP_READ16, 0, lba[0], lba[1], lba[2], lba[3],
                       lba[4], lba[5], lba[6], lba[7], 0, 0, 0, 1, 0, 0);
    check(answer.complete && !good && (!disk.scsi || answer.sense == LBA_OUT_OF_RANGE), "behind",
          "status=%02x sense=%06x", answer.status, answer.sense);

    address_lun = 1;
    good = command(FROM_DISK, 96, 6, SCSIOP_INQUIRY, 0, 0, 0, 96, 0);
    int absent = scratch[0] >> 5 == 3 || scratch[0] == NO_LUN_TYPE;
    check(answer.complete && (!good || absent), "lun1", "status=%02x type=%02x sense=%06x",
          answer.status, scratch[0], answer.sense);
    address_lun = 0;
    address_target = 1;
    good = command(FROM_DISK, 96, 6, SCSIOP_INQUIRY, 0, 0, 0, 96, 0);
    check(answer.complete && !good, "target1", "status=%02x", answer.status);
    address_target = 0;
}
