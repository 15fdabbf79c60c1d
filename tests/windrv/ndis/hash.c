/* Toeplitz' hash of a connection, and the table from hashes to processors. */
#include "scale.h"

/* The key and the example of Microsoft's documentation, "Verifying the RSS hash calculation". */
static const u8 KEY[] = {0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67,
                         0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca, 0x2b, 0xcb,
                         0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30,
                         0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa};
static const u8 EXAMPLE[] = {66,  9,  149,       187,         161,       142,
                             100, 80, 2794 >> 8, 2794 & 0xff, 1766 >> 8, 1766 & 0xff};
static struct {
    u32 first, processors, turn, driver_turn;
} table;

static u32 toeplitz(const u8 *input, u32 length)
{
    u32 hash = 0, window = (u32)KEY[0] << 24 | KEY[1] << 16 | KEY[2] << 8 | KEY[3];
    for (u32 bit = 0; bit < 8 * length; bit++) {
        u32 next = bit + 32;
        if (input[bit / 8] >> (7 - bit % 8) & 1)
            hash ^= window;
        window = window << 1 | (KEY[next / 8] >> (7 - next % 8) & 1);
    }
    return hash;
}

u32 hash_example(void)
{
    return toeplitz(EXAMPLE, sizeof EXAMPLE);
}

u32 hash_make(const Flow *flow, u32 from, u32 to)
{
    u8 headers[128], input[36];
    u32 length = flow->v6 ? 16 : 4;
    flow_headers(headers, flow, 0, 1);
    const u8 *own = headers + HEADER + (flow->v6 ? 8 : 12);
    memcpy(input, own + length, length);
    memcpy(input + length, own, length);
    put2(input + 2 * length, from);
    put2(input + 2 * length + 2, to);
    return toeplitz(input, 2 * length + 4);
}

static u32 place(u32 hash, u32 turn)
{
    return table.first + (hash % TABLE * 7 + turn) % table.processors;
}

NDIS_STATUS table_set(u32 first, u32 processors, u32 turn)
{
    static struct {
        NDIS_RECEIVE_SCALE_PARAMETERS it;
        PROCESSOR_NUMBER table[TABLE];
        u8 key[sizeof KEY];
    } set;
    memset(&set, 0, sizeof set);
    set.it.Header.Type = NDIS_OBJECT_TYPE_RSS_PARAMETERS;
    set.it.Header.Revision = NDIS_RECEIVE_SCALE_PARAMETERS_REVISION_3;
    set.it.Header.Size = NDIS_SIZEOF_RECEIVE_SCALE_PARAMETERS_REVISION_3;
    set.it.HashInformation = NdisHashFunctionToeplitz | NDIS_HASH_TCP_IPV4 | NDIS_HASH_TCP_IPV6 |
                             NDIS_HASH_UDP_IPV4 | NDIS_HASH_UDP_IPV6;
    set.it.BaseCpuNumber = first;
    set.it.DefaultProcessorNumber.Number = first;
    set.it.IndirectionTableSize = sizeof set.table;
    set.it.IndirectionTableOffset = (u8 *)set.table - (u8 *)&set;
    set.it.HashSecretKeySize = sizeof set.key;
    set.it.HashSecretKeyOffset = set.key - (u8 *)&set;
    memcpy(set.key, KEY, sizeof KEY);
    if (!processors)
        set.it.Flags = NDIS_RSS_PARAM_FLAG_DISABLE_RSS;
    spin_lock(&delivery_lock);
    table.first = first;
    table.processors = processors;
    table.turn = turn;
    spin_unlock(&delivery_lock);
    for (u32 i = 0; i < TABLE && processors; i++)
        set.table[i].Number = place(i, turn);
    NDIS_STATUS status = nic_set(OID_GEN_RECEIVE_SCALE_PARAMETERS, &set, sizeof set);
    table.driver_turn = turn;
    return status;
}

u32 table_turn(void)
{
    return table.driver_turn;
}

int table_gives(u32 turn, u32 hash, u32 processor)
{
    return turn != table.turn || place(hash, turn) == processor;
}
