/* Checks: the driver is stopped or removed while requests are in flight, and is started again. */
#include "disk.h"

/* Requests in flight, and their blocks: some are long, so that they are not done at once. */
enum { DEPTH = 100, SHORT_BLOCKS = 8, LONG_BLOCKS = 64 };
enum { SLEEP = -1, KEY_UNIT_ATTENTION = 6 };

/* The status of requests that the driver left to StorPort, and of one that comes too late. */
static const struct Way {
    const char *name;
    int action; /* of a PnP request; SLEEP: only the power state changes */
    u8 left, late;
} WAYS[] = {
    {"removal.surprise", StorSurpriseRemoval, SRB_STATUS_NO_DEVICE, SRB_STATUS_NO_DEVICE},
    {"removal.remove", StorRemoveDevice, SRB_STATUS_NO_DEVICE, SRB_STATUS_NO_DEVICE},
    {"removal.stop", StorStopDevice, SRB_STATUS_ABORTED, SRB_STATUS_ABORTED},
    {"removal.sleep", SLEEP, SRB_STATUS_BUS_RESET, 0},
};

/* Results of the requests that were in flight. */
typedef struct {
    u32 done, driver, port, other, status;
} Ends;

/* Queues requests without starting them, and then starts all of them at once. */
static void start_requests(void)
{
    u32 slice = disk.region / MAX_REQUESTS;
    pause_queue(disk.adapter, 1);
    for (u32 i = 1; i <= DEPTH; i++) {
        Transfer it = {.write = i & 1, .block = i * slice, .shape = i % SHAPES, .max_pieces = 64};
        u32 most = slice < LONG_BLOCKS ? slice : LONG_BLOCKS;
        it.blocks = i % 4 ? SHORT_BLOCKS : most;
        transfer(requests[i], it);
    }
    pause_queue(disk.adapter, 0);
}

/* Sends a request to the adapter, which the driver answers at once. */
static int send_pnp(STOR_PNP_ACTION action)
{
    Request *request = requests[0];
    u64 until = microseconds() + disk.seconds * 1000000ull;
    request_clear(request);
    SRBEX_DATA_PNP *pnp = (SRBEX_DATA_PNP *)request->command;
    memset(pnp, 0, sizeof *request->command);
    pnp->Type = SrbExDataTypePnP;
    pnp->Length = sizeof *pnp - 8;
    pnp->PnPAction = action;
    pnp->SrbPnPFlags = SRB_PNP_FLAGS_ADAPTER_REQUEST;
    request->srb->SrbFunction = SRB_FUNCTION_PNP;
    submit(disk.adapter, request);
    while (request->state != DONE && microseconds() < until)
        if (!poll_adapter(disk.adapter))
            wait_for_interrupt();
    int good = request->state == DONE && request->status == SRB_STATUS_SUCCESS;
    request->state = IDLE;
    return good;
}

/* vioscsi does not know the action "stop". It completes the requests of a unit that has gone. */
static int tell_driver(const struct Way *way)
{
    Adapter *adapter = disk.adapter;
    STOR_ADDR_BTL8 unit = {STOR_ADDRESS_TYPE_BTL8, 0, STOR_ADDR_BTL8_ADDRESS_LENGTH, 0, 0, 0, 0};
    if (way->action == SLEEP || (disk.scsi && way->action == StorStopDevice))
        return 1;
    if (!disk.scsi || way->action != StorSurpriseRemoval)
        return send_pnp(way->action);
    return adapter_control(ScsiAdapterSurpriseRemoval) &&
           adapter->hw.HwUnitControl(adapter->extension, ScsiUnitSurpriseRemoval, &unit) ==
               ScsiUnitControlSuccess;
}

/* The status of a request that comes after the removal. */
static u8 send_late(void)
{
    transfer(requests[0], (Transfer){.block = 0, .blocks = SHORT_BLOCKS});
    u64 until = microseconds() + disk.seconds * 1000000ull;
    while (requests[0]->state != DONE && microseconds() < until)
        if (!poll_adapter(disk.adapter))
            wait_for_interrupt();
    pieces_free(requests[0]);
    u8 status = requests[0]->state == DONE ? requests[0]->status : 0;
    requests[0]->state = IDLE;
    return status;
}

/* StorPort completes the requests that the driver has left. A write without success may or may not
 * have reached the disk, or a part of it. */
static void end_requests(const struct Way *way, const u8 left[], Ends *ends)
{
    for (u32 i = 1; i <= DEPTH; i++) {
        Request *request = requests[i];
        io.twice += request->completions != 1;
        if (request->status == SRB_STATUS_SUCCESS) {
            ends->done++;
            if (!request->write)
                verify(request);
        } else if (left[i]) {
            ends->port++;
        } else if (request->status == way->left || request->status == way->late ||
                   sense_of(request) >> 16 == KEY_UNIT_ATTENTION) {
            ends->driver++;
        } else {
            ends->other++;
            ends->status = request->srb->SrbStatus;
        }
        if (request->write && request->status != SRB_STATUS_SUCCESS)
            for (u32 block = 0; block < request->blocks; block++)
                disk.generation[request->block + block] = UNKNOWN;
        pieces_free(request);
        request->state = IDLE;
    }
}

/* Starts the driver again after a removal, or wakes it. BARs are elsewhere after a removal. */
static int start_again(const struct Way *way, u32 turn)
{
    Adapter *adapter = disk.adapter;
    messages_stop(&adapter->interrupts);
    if (way->action != SLEEP) {
        adapter_stop(adapter);
        if (!bars_move(adapter->pci, turn) || !driver_start())
            return 0;
        /* viostor refuses reads and writes before this command. */
        return read_capacity() == disk.blocks;
    }
    messages_start(&adapter->interrupts, adapter->mode.messages, adapter->mode.polled);
    return adapter_control(ScsiRestartAdapter);
}

/* Marks the requests that StorPort completes. In sleep, queued ones wait for the driver. */
static void find_left(const struct Way *way, u8 left[])
{
    for (u32 i = 1; i <= DEPTH; i++) {
        RequestState state = requests[i]->state;
        left[i] = state == STARTED || (state == QUEUED && way->action != SLEEP);
    }
}

static void end_left(const struct Way *way, const u8 left[])
{
    for (u32 i = 1; i <= DEPTH; i++)
        if (left[i])
            end_by_port(disk.adapter, requests[i], way->left);
}

/* Each request ends once, and the disk has what was acknowledged. Memory of requests is used again
 * only after the device's reset, which the driver does while it stops or, in sleep, restarts. */
static void removal(const struct Way *way, u32 turn)
{
    Adapter *adapter = disk.adapter;
    Ends ends = {0};
    u8 left[DEPTH + 1];
    int asleep = way->action == SLEEP, untold = disk.scsi && way->action == StorStopDevice;
    io_clear();
    start_requests();
    u32 in_flight = adapter->queue.outstanding;
    int told = tell_driver(way);
    u8 late = asleep || untold ? way->late : send_late();
    int stopped = adapter_control(ScsiStopAdapter);
    find_left(way, left);
    int started = asleep ? start_again(way, turn) : 1;
    end_left(way, left);
    started = started && wait_until_idle(adapter, disk.seconds);
    end_requests(way, left, &ends);
    u32 twice = adapter->calls.completed_twice + adapter->calls.completed_unknown;
    started = started && (asleep || start_again(way, turn));
    wrong.used_lengths = 0;
    for (u32 i = 1; started && i <= 8; i++)
        one((Transfer){.write = i & 1, .block = i / 2 * 600, .blocks = SHORT_BLOCKS});
    /* Otherwise the driver or another processor may have completed all of them already. */
    int early = adapter->performance.flags & STOR_PERF_OPTIMIZE_FOR_COMPLETION_DURING_STARTIO;
    int enough = in_flight || early || adapter->mode.together;
    int good = enough && told && stopped && started && late == way->late;
    check(good && !ends.other && !twice && io_good(), way->name,
          "in_flight=%u told=%u stopped=%u started=%u late=%02x done=%u driver=%u port=%u other=%u "
          "status=%02x unknown=%u twice=%u failed=%u short=%u lost=%u wrong_blocks=%u stray=%u",
          in_flight, told, stopped, started, late, ends.done, ends.driver, ends.port, ends.other,
          ends.status, twice, io.twice, io.failed, io.short_ones, io.lost, wrong.blocks,
          wrong.stray_pages);
}

void removals(void)
{
    for (u32 i = 0; i < sizeof WAYS / sizeof *WAYS; i++)
        removal(&WAYS[i], i);
}
