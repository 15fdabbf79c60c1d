//! Variables of the network.

use crate::settings::variable::{Variable, variables};

pub(super) const NETWORK: &[Variable] = variables! {
    /// The guest's network: `nat` (a tap interface with address translation, which needs NET_ADMIN
    /// and /dev/net/tun), `user` (user mode: the container opens the connections itself, without
    /// privileges) or `none`. `Y` means `nat`, and `N` means `none`.
    full "NETWORK" = "nat" (network.kind): Network;
    /// Attaches the guest directly to the network of the container's interface, where it gets an
    /// address by DHCP. Needs a macvlan network or an Ethernet card, NET_ADMIN, MKNOD and the
    /// device rule `c *:* rwm`; with NET_RAW, the container learns the guest's address.
    full "DHCP" = "N" (network.dhcp): Unsupported;
    /// The container's interface to the network. Defaults to one that Kubernetes added (net3 to
    /// net0), else to that of the default route.
    full "DEV" or "VM_NET_DEV" = "" (network.uplink): Network;
    /// The guest's IPv4 address. Defaults to one in an unused network, like 172.30.0.2.
    full "IP" or "VM_NET_IP" = "" (network.address): Network;
    /// The mask of the guest's network.
    full "MASK" or "VM_NET_MASK" = "255.255.255.0" (network.mask): Address;
    /// The MAC address of the guest's network card. Defaults to one that is derived from the
    /// container's name and kept on the volume.
    full "MAC" or "VM_NET_MAC" = "" (network.mac): Address;
    /// The name of the tap interface.
    full "TAP" or "VM_NET_TAP" = "qemu" (network.tap): Network;
    /// The name of the bridge.
    ignored "BRIDGE" or "VM_NET_BRIDGE" = "docker"
        => "there is no bridge, as the tap interface has the gateway's address: leave it out";
    /// The MTU in bytes. Defaults to that of the container's interface.
    full "MTU" or "VM_NET_MTU" = "" (network.mtu): Network;
    /// The model of the guest's network card.
    translated "ADAPTER" = "virtio" (network.adapter): Network;
    /// Ports that stay with the container and are not forwarded to the guest.
    full "HOST_PORTS" = "" (network.host_ports): Network;
    /// Ports that are forwarded to the guest in user mode, in addition to 3389. With `nat`, all
    /// ports are forwarded by IPv4. There, the TCP ports of this list are also forwarded from the
    /// container's loopback address (for `kubectl port-forward`) and by IPv6.
    full "USER_PORTS" = "" (network.user_ports): Network;
    /// The port of a health check.
    ignored "CHECK_PORT" = "80"
        => "health is reported at /healthz and /readyz of the web port: use these for probes";
    /// Options of dnsmasq.
    ignored "DNSMASQ_OPTS" = ""
        => "DHCP and DNS are built in: set IP, MASK, MTU and HOST";
    /// Log messages of dnsmasq.
    ignored "DNSMASQ_DEBUG" = "N" => "DHCP and DNS are built in: set DEBUG=Y";
    /// Disables dnsmasq.
    ignored "DNSMASQ_DISABLE" = "N"
        => "DHCP and DNS are built in and always enabled with NETWORK=nat: leave it out";
    /// The path of dnsmasq.
    ignored "DNSMASQ" = "" => "DHCP and DNS are built in: leave it out";
    /// The PID file of dnsmasq.
    ignored "DNSMASQ_PID" = "" => "DHCP and DNS are built in: leave it out";
    /// A folder with configuration files of dnsmasq, in old versions.
    ignored "DNSMASQ_CONF_DIR" = ""
        => "DHCP and DNS are built in: set IP, MASK, MTU and HOST";
    /// Log messages of dnsmasq, in old versions.
    ignored "DEBUG_DNS" = "N" => "DHCP and DNS are built in: set DEBUG=Y";
    /// The path of passt.
    ignored "PASST" = "" => "user mode is built in: leave it out";
    /// Options of passt.
    ignored "PASST_OPTS" = ""
        => "user mode is built in: set USER_PORTS and HOST_PORTS for ports";
    /// Log messages of passt.
    ignored "PASST_DEBUG" = "N" => "user mode is built in: set DEBUG=Y";
    /// The PID file of passt.
    ignored "PASST_PID" = "" => "user mode is built in: leave it out";
    /// The socket of passt.
    ignored "PASST_SOCKET" = "" => "user mode is built in: leave it out";
};
