/* Reads and writes: their CDBs, and the check of their results. */
#include "disk.h"

enum { KEY_UNIT_ATTENTION = 6, KEY_MASK = 15, CDB_FUA = 8 };

struct Outcome io;

void io_clear(void)
{
    memset(&io, 0, sizeof io);
    memset(&wrong, 0, sizeof wrong);
}

int io_good(void)
{
    return !io.failed && !io.lost && !io.twice && !io.short_ones && !wrong.blocks &&
           !wrong.stray_pages && !(wrong.used_lengths && used_lengths_matter());
}

void io_check(const char *name)
{
    if (io_good())
        check(1, name, "requests=%u", io.done);
    else
        check(0, name,
              "requests=%u failed=%u status=%02x sense=%06x lost=%u twice=%u short=%u "
              "wrong_blocks=%u first=%u stray=%u used_lengths=%u",
              io.done, io.failed, io.last_status, io.last_sense, io.lost, io.twice, io.short_ones,
              wrong.blocks, wrong.first, wrong.stray_pages, wrong.used_lengths);
}

u32 sense_of(const Request *request)
{
    const u8 *sense = request->sense;
    return (sense[2] & KEY_MASK) << 16 | sense[12] << 8 | sense[13];
}

static void build_cdb(u8 *cdb, Transfer it)
{
    switch (it.cdb_length) {
    case 16:
        cdb[0] = it.write ? SCSIOP_WRITE16 : SCSIOP_READ16;
        big_endian(cdb + 2, it.block, 8);
        big_endian(cdb + 10, it.blocks, 4);
        break;
    case 12:
        cdb[0] = it.write ? SCSIOP_WRITE12 : SCSIOP_READ12;
        big_endian(cdb + 2, it.block, 4);
        big_endian(cdb + 6, it.blocks, 4);
        break;
    case 6:
        cdb[0] = it.write ? SCSIOP_WRITE6 : SCSIOP_READ6;
        big_endian(cdb + 1, it.block, 3);
        cdb[4] = it.blocks;
        break;
    default:
        cdb[0] = it.write ? SCSIOP_WRITE : SCSIOP_READ;
        big_endian(cdb + 2, it.block, 4);
        big_endian(cdb + 7, it.blocks, 2);
    }
    if (it.fua)
        cdb[1] |= CDB_FUA;
}

/* Blocks beyond the region are written once, with the content that the host expects. */
static u32 generation_new(u64 block, u32 blocks)
{
    static u32 last;
    if (block >= disk.region)
        return FINAL;
    u32 generation = COUNT(last) + 1;
    for (u32 i = 0; i < blocks; i++) {
        disk.generation[block + i] = generation;
        disk.zeroed[block + i] = 0;
    }
    return generation;
}

void transfer(Request *request, Transfer it)
{
    request_clear(request);
    if (!it.cdb_length)
        it.cdb_length = 10;
    request->write = it.write;
    request->block = it.block;
    request->blocks = it.blocks;
    pieces_make(request, it.shape, it.max_pieces);
    build_cdb(request->command->Cdb, it);
    request->command->CdbLength = it.cdb_length;
    request->srb->SrbFunction = SRB_FUNCTION_EXECUTE_SCSI;
    request->srb->SrbFlags = (it.write ? TO_DISK : FROM_DISK) | SRB_FLAGS_QUEUE_ACTION_ENABLE;
    request->srb->DataTransferLength = it.blocks * disk.block;
    /* An unmapped address: the drivers must use the list. */
    request->srb->DataBuffer = (PVOID)0xffff900000000000ull;
    if (it.write) {
        request->generation = generation_new(it.block, it.blocks);
        fill(request);
    }
    submit(disk.adapter, request);
}

static int is_attention(const Request *request)
{
    int sense = request->srb->SrbStatus & SRB_STATUS_AUTOSENSE_VALID;
    return request->status == SRB_STATUS_ERROR && sense &&
           sense_of(request) >> 16 == KEY_UNIT_ATTENTION;
}

/* Repeats a request, as the class driver does after a reset. vioscsi does not wait for the end of
 * the device's reset, which may thus still hit a later request. */
static int sent_again(Request *request)
{
    if (is_attention(request))
        COUNT(disk.attentions);
    else if (request->status == SRB_STATUS_BUS_RESET && disk.resetting)
        disk.resetting = 0;
    else
        return 0;
    /* The used element of an answer without data is shorter. */
    wrong.used_lengths = 0;
    request->srb->SrbStatus = 0;
    request->srb->DataTransferLength = request->length;
    request->completions = 0;
    submit(disk.adapter, request);
    return 1;
}

int judge(Request *request)
{
    if (sent_again(request))
        return 0;
    COUNT(io.done);
    if (request->completions != 1)
        COUNT(io.twice);
    if (request->status != SRB_STATUS_SUCCESS) {
        COUNT(io.failed);
        io.last_status = request->srb->SrbStatus;
        io.last_sense = sense_of(request);
    } else {
        if (request->srb->DataTransferLength != request->length)
            COUNT(io.short_ones);
        if (!request->write)
            verify(request);
    }
    pieces_free(request);
    request->state = IDLE;
    return 1;
}

void give_up(const char *name)
{
    check(0, name, "requests=%u never ended: %u", io.done, io.lost);
    machine_end();
}

void wait_all(u32 count)
{
    for (int again = 1; again;) {
        again = 0;
        if (disk.sent)
            disk.sent();
        /* A late request counts as lost: it was found without its interrupt. */
        io.lost += !wait_until_idle(disk.adapter, disk.seconds);
        for (u32 i = 0; i < count; i++)
            if (requests[i]->state == DONE)
                again |= !judge(requests[i]);
            else if (requests[i]->state != IDLE)
                io.lost++;
        if (io.lost)
            give_up("requests");
    }
}

void one(Transfer it)
{
    transfer(requests[0], it);
    wait_all(1);
}
