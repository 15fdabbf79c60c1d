//! Packet sockets: they receive the packets of one protocol at one interface (packet(7)).
#![expect(unsafe_code, reason = "no library makes an address of this family")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// Opens a non-blocking socket that receives the packets of a protocol at an interface, without the
/// frame's header. Needs CAP_NET_RAW.
pub fn packet_socket(protocol: u16, interface: u32) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // With protocol 0 the socket receives nothing before it is bound.
    let socket = socket_with(AddressFamily::PACKET, SocketType::DGRAM, flags, None)?;
    let address = libc::sockaddr_ll {
        sll_family: AddressFamily::PACKET.as_raw(),
        sll_protocol: protocol.to_be(),
        sll_ifindex: interface.cast_signed(),
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let length = libc::socklen_t::try_from(size_of_val(&address)).map_err(io::Error::other)?;
    // SAFETY: the address is a complete one of its family, and lives during the call.
    let bound = unsafe {
        libc::bind(socket.as_raw_fd(), (&raw const address).cast::<libc::sockaddr>(), length)
    };
    if bound < 0 { Err(io::Error::last_os_error()) } else { Ok(socket) }
}

#[cfg(test)]
mod test {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn needs_an_existing_interface() {
        const ARP: u16 = 0x806;
        match packet_socket(ARP, 0x7fff_ffff) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::PERM) => {}
            other => {
                assert_eq!(Errno::from_io_error(&other.unwrap_err()), Some(Errno::NODEV));
                // The loopback interface, which every network namespace has.
                packet_socket(ARP, 1).unwrap();
            }
        }
    }
}
