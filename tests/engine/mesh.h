// mesh.h - TCP connections between all ranks of a job, for the stand-in of NCCL when ranks are processes. Test-only.
//
// Rank 0 listens at the address that all ranks were given. Each other rank connects to rank 0, sends its own listening
// address, and receives the addresses of all ranks. Then every rank connects to every other rank. One thread per mesh
// sets up the connections, sends queued messages and delivers received ones. It never blocks on a peer while it holds
// the lock: messages to a stopped peer stay queued in memory.
//
// This thread calls the hooks, with the engine's lock held.
#ifndef MTE_MESH_H
#define MTE_MESH_H

#include "runtime.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace mte {

enum class MessageKind : uint32_t { call, data, connect, round, bye };

// A message from one rank to another. Fields that a kind does not need are 0.
struct Message {
    MessageKind what;
    int32_t rank; // rank of the sender in the communicator
    // id of the communicator; number of its collective or round (MessageKind::data: of the call that the data belongs
    // to)
    uint64_t clique, number;
    uint64_t serial; // number of the call
    uint64_t count;
    int32_t kind, type, op, root;
    int32_t color, key;
    uint64_t bytes; // size of the payload that follows the message
};

// How a rank introduces itself. The struct has a fixed size and is sent as raw bytes.
struct Introduction {
    int32_t rank, device;
    uint32_t address, port; // in network order; the address is the one that rank 0 sees
    char host[64];          // name of the host that `device` belongs to
};

class Mesh : public std::enable_shared_from_this<Mesh> {
  public:
    struct Hooks {
        std::function<void(const std::vector<Introduction> &)> ready;
        std::function<void(const std::string &)> failed;
        std::function<void(int, const Message &, const std::vector<unsigned char> &)> message;
        std::function<void(int, const std::string &)> lost;
    };

    int users = 1; // number of communicators that use the mesh

    // Starts connecting. `place` is "host:port". Returns NULL if `place` cannot be resolved.
    static std::shared_ptr<Mesh> start(const std::string &place, int ranks, const Introduction &self,
                                       const Hooks &hooks) {
        std::shared_ptr<Mesh> mesh(new Mesh(ranks, self, hooks));
        if (!mesh->resolve(place)) return nullptr;
        std::thread([mesh] { mesh->run(); }).detach();
        return mesh;
    }

    // Queues a message. Call with the lock held.
    void send(int to, const Message &message, const std::vector<unsigned char> &payload) {
        Peer &peer = peers_[static_cast<size_t>(to)];
        if (peer.fd < 0) return;
        peer.out.append(reinterpret_cast<const char *>(&message), sizeof message);
        peer.out.append(reinterpret_cast<const char *>(payload.data()), payload.size());
        wake();
    }

    // Closes the connections; call with or without the lock held. With `orderly`, queued messages are still sent, and
    // peers learn that this rank left on purpose.
    void close(bool orderly) {
        Guard guard;
        const Message bye = {MessageKind::bye, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
        for (int to = 0; orderly && to < static_cast<int>(peers_.size()); to++) send(to, bye, {});
        closing_ = orderly ? kFlush : kNow;
        wake();
    }

    // Waits up to 5 seconds until close() is complete. Call without the lock held.
    void wait_closed() {
        for (int i = 0; i < 5000; i++) {
            {
                Guard guard;
                if (closing_ == kOpen || closed_) return;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }

    ~Mesh() {
        for (int fd : {listener_, bell_[0], bell_[1]})
            if (fd >= 0) ::close(fd);
        for (Peer &peer : peers_)
            if (peer.fd >= 0) ::close(peer.fd);
    }

  private:
    enum { kOpen, kFlush, kNow };

    struct Peer {
        int fd = -1;
        bool left = false;
        std::string in, out, name;
    };

    int ranks_, listener_ = -1, bell_[2] = {-1, -1}, closing_ = kOpen;
    bool closed_ = false;
    std::string why_; // why the connections could not be set up
    Introduction self_;
    Hooks hooks_;
    sockaddr_in place_ = {};
    std::vector<Peer> peers_;
    std::vector<Introduction> all_;

    Mesh(int ranks, const Introduction &self, const Hooks &hooks)
        : ranks_(ranks), self_(self), hooks_(hooks), peers_(static_cast<size_t>(ranks)),
          all_(static_cast<size_t>(ranks)) {
        if (pipe(bell_) == 0)
            for (int fd : bell_) fcntl(fd, F_SETFL, O_NONBLOCK);
    }

    void wake() {
        if (write(bell_[1], "", 1) < 0) return; // A full pipe needs no further byte: the thread is awake.
    }

    bool resolve(const std::string &place) {
        const size_t colon = place.rfind(':');
        addrinfo hints = {}, *found = nullptr;
        hints.ai_family = AF_INET;
        hints.ai_socktype = SOCK_STREAM;
        if (colon == std::string::npos || atoi(place.c_str() + colon + 1) <= 0) return false;
        if (getaddrinfo(place.substr(0, colon).c_str(), place.c_str() + colon + 1, &hints, &found) != 0) return false;
        memcpy(&place_, found->ai_addr, sizeof place_);
        freeaddrinfo(found);
        return true;
    }

    bool gives_up() {
        Guard guard;
        return closing_ != kOpen;
    }

    bool fail(const std::string &why) {
        why_ = why + ": " + strerror(errno);
        return false;
    }

    // ---- setting up: one connection after the other; no wait outlives the mesh --------------------------------------

    bool wait_readable(int fd) {
        pollfd one = {fd, POLLIN, 0};
        while (poll(&one, 1, 20) <= 0)
            if (gives_up()) return false;
        return true;
    }

    bool listen_at(const sockaddr_in &where) {
        const int yes = 1;
        listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
        if (bind(listener_, reinterpret_cast<const sockaddr *>(&where), sizeof where) != 0) return fail("bind");
        return listen(listener_, ranks_) == 0 || fail("listen");
    }

    int accept_one(sockaddr_in *from) {
        socklen_t bytes = sizeof *from;
        return wait_readable(listener_) ? accept4(listener_, reinterpret_cast<sockaddr *>(from), &bytes, SOCK_CLOEXEC)
                                        : -1;
    }

    // Retries until the peer listens, which may not have started yet.
    int connect_to(const sockaddr_in &where) {
        while (!gives_up()) {
            const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
            if (connect(fd, reinterpret_cast<const sockaddr *>(&where), sizeof where) == 0) return fd;
            ::close(fd);
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        return -1;
    }

    bool read_all(int fd, void *to, size_t bytes) {
        for (char *p = static_cast<char *>(to); bytes > 0;) {
            if (!wait_readable(fd)) return false;
            const ssize_t n = recv(fd, p, bytes, 0);
            if (n <= 0) return fail("recv");
            p += n;
            bytes -= static_cast<size_t>(n);
        }
        return true;
    }

    bool write_all(int fd, const void *from, size_t bytes) { // the data fits into the system's buffer
        return ::send(fd, from, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes) || fail("send");
    }

    void adopt(int fd, const Introduction &who) {
        const int yes = 1;
        char text[INET_ADDRSTRLEN] = "";
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        fcntl(fd, F_SETFL, O_NONBLOCK);
        in_addr address = {who.address};
        inet_ntop(AF_INET, &address, text, sizeof text);
        Peer &peer = peers_[static_cast<size_t>(who.rank)];
        peer.fd = fd;
        peer.name = std::string(text) + "<" + std::to_string(ntohs(static_cast<uint16_t>(who.port))) + ">";
        all_[static_cast<size_t>(who.rank)] = who;
    }

    // Accepts the connections of `expected` ranks, each of which introduces itself.
    bool take_connections(int expected) {
        for (int i = 0; i < expected; i++) {
            sockaddr_in from = {};
            Introduction who = {};
            const int fd = accept_one(&from);
            if (fd < 0 || !read_all(fd, &who, sizeof who)) return false;
            if (who.rank <= 0 || who.rank >= ranks_ || peers_[static_cast<size_t>(who.rank)].fd >= 0) {
                why_ = "rank " + std::to_string(who.rank) + " of " + std::to_string(ranks_) + " has already checked in";
                return false;
            }
            if (self_.rank == 0) who.address = from.sin_addr.s_addr;
            adopt(fd, who);
        }
        return true;
    }

    bool begin_as_root() {
        all_[0] = self_;
        if (!listen_at(place_) || !take_connections(ranks_ - 1)) return false;
        for (int r = 1; r < ranks_; r++)
            if (!write_all(peers_[static_cast<size_t>(r)].fd, all_.data(), sizeof(Introduction) * all_.size()))
                return false;
        return true;
    }

    // Exchanges addresses with rank 0, connects to the lower ranks and accepts the higher ones.
    bool begin_as_other() {
        sockaddr_in any = {}, mine = {};
        socklen_t bytes = sizeof mine;
        any.sin_family = AF_INET;
        if (!listen_at(any)) return false;
        getsockname(listener_, reinterpret_cast<sockaddr *>(&mine), &bytes);
        self_.port = mine.sin_port;
        const int root = connect_to(place_);
        if (root < 0 || !write_all(root, &self_, sizeof self_)) return false;
        std::vector<Introduction> table(all_.size());
        if (!read_all(root, table.data(), sizeof(Introduction) * table.size())) return false;
        self_ = table[static_cast<size_t>(self_.rank)];
        table[0].address = place_.sin_addr.s_addr;
        table[0].port = place_.sin_port;
        adopt(root, table[0]);
        all_ = table;
        return connect_to_lower() && take_connections(ranks_ - 1 - self_.rank);
    }

    bool connect_to_lower() {
        for (int r = 1; r < self_.rank; r++) {
            sockaddr_in where = {};
            where.sin_family = AF_INET;
            where.sin_addr.s_addr = all_[static_cast<size_t>(r)].address;
            where.sin_port = static_cast<uint16_t>(all_[static_cast<size_t>(r)].port);
            const int fd = connect_to(where);
            if (fd < 0 || !write_all(fd, &self_, sizeof self_)) return false;
            adopt(fd, all_[static_cast<size_t>(r)]);
        }
        return true;
    }

    // ---- the connected mesh -----------------------------------------------------------------------------------------

    void lose(int rank) {
        Peer &peer = peers_[static_cast<size_t>(rank)];
        ::close(peer.fd);
        peer.fd = -1;
        peer.out.clear();
        if (!peer.left && closing_ == kOpen) hooks_.lost(rank, "Connection closed by remote peer " + peer.name);
    }

    // Delivers the complete messages in the input buffer of a peer.
    void take_messages(int rank) {
        Peer &peer = peers_[static_cast<size_t>(rank)];
        size_t at = 0;
        Message message;
        while (peer.in.size() - at >= sizeof message) {
            memcpy(&message, peer.in.data() + at, sizeof message);
            if (peer.in.size() - at - sizeof message < message.bytes) break;
            const unsigned char *p = reinterpret_cast<const unsigned char *>(peer.in.data()) + at + sizeof message;
            const std::vector<unsigned char> payload(p, p + message.bytes);
            at += sizeof message + message.bytes;
            if (message.what == MessageKind::bye) peer.left = true;
            else if (closing_ == kOpen) hooks_.message(rank, message, payload);
        }
        peer.in.erase(0, at);
    }

    // Reads what has arrived from a peer, without blocking.
    void read_some(int rank) {
        char buffer[65536];
        for (;;) {
            const ssize_t n = recv(peers_[static_cast<size_t>(rank)].fd, buffer, sizeof buffer, 0);
            if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
            if (n <= 0) {
                lose(rank);
                return;
            }
            peers_[static_cast<size_t>(rank)].in.append(buffer, static_cast<size_t>(n));
            take_messages(rank);
        }
    }

    void write_some(int rank) {
        Peer &peer = peers_[static_cast<size_t>(rank)];
        const ssize_t n = ::send(peer.fd, peer.out.data(), peer.out.size(), MSG_NOSIGNAL);
        if (n > 0) peer.out.erase(0, static_cast<size_t>(n));
        else if (n < 0 && errno != EAGAIN && errno != EINTR) lose(rank);
    }

    bool is_over() const {
        bool queued = false;
        for (const Peer &peer : peers_) queued = queued || (peer.fd >= 0 && !peer.out.empty());
        return closing_ == kNow || (closing_ == kFlush && !queued);
    }

    std::vector<pollfd> interests() const {
        std::vector<pollfd> all = {{bell_[0], POLLIN, 0}};
        for (const Peer &peer : peers_)
            all.push_back({peer.fd, static_cast<short>(POLLIN | (peer.out.empty() ? 0 : POLLOUT)), 0});
        return all;
    }

    // Sends and receives until the mesh is closed. The lock is not held in poll.
    void serve() {
        for (;;) {
            std::vector<pollfd> all;
            {
                Guard guard;
                if (is_over()) return;
                all = interests();
            }
            poll(all.data(), all.size(), 100);
            char bells[64];
            while (read(bell_[0], bells, sizeof bells) > 0) continue;
            Guard guard;
            for (int r = 0; r < ranks_; r++) {
                const short events = all[static_cast<size_t>(r) + 1].revents;
                if (events & POLLOUT) write_some(r);
                if (peers_[static_cast<size_t>(r)].fd >= 0 && (events & (POLLIN | POLLHUP | POLLERR))) read_some(r);
            }
        }
    }

    // The body of the mesh's thread.
    void run() {
        const bool good = self_.rank == 0 ? begin_as_root() : begin_as_other();
        {
            Guard guard;
            if (closing_ == kOpen && good) hooks_.ready(all_);
            if (closing_ == kOpen && !good) hooks_.failed(why_);
        }
        if (good) serve();
        Guard guard;
        for (Peer &peer : peers_) {
            if (peer.fd >= 0) ::close(peer.fd);
            peer.fd = -1;
        }
        closed_ = true;
        hooks_ = Hooks();
    }
};

} // namespace mte

#endif // MTE_MESH_H
